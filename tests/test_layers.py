"""Layering: the library in its order, the applications above it, and only the command line prints."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "adlm"

# The library, from the bottom: each imports only what stands before it. docs/architecture.md explains them.
# fmt: off
LIBRARY = [
    "errors", "registry", "files", "hub", "bases", "config", "request", "distributed", "tokens", "canvas",
    "constraints", "chat", "diffusion", "models", "data", "sampling", "inference", "methods", "limits", "checkpoints",
    "likelihood", "language_model", "samples_file", "training",
]
# fmt: on
SHARED = ("plots", "trace")  # the applications that others may import
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.name.startswith("__"))


def imported(path: Path) -> list[str]:
    """The modules of the package that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the whole path"
            names += [
                f"{node.module}.{alias.name}" if node.module in ("adlm", "adlm.apps") else str(node.module)
                for alias in node.names
            ]
    of_package = {"adlm.__version__", "adlm.code_commit", "adlm.UNKNOWN_COMMIT"}
    return [name for name in names if name.startswith("adlm.") and name not in of_package]


def may_import(importer: tuple[str, ...], module: tuple[str, ...]) -> bool:
    """The three rules, for the parts of two names below `adlm`, such as ("apps", "trace", "page")."""
    if module[0] == "cli":  # nothing imports the command line
        return importer[0] == "cli"
    if module[0] == "apps":  # the library imports no application; applications share plots and traces only
        own = importer[0] == "apps" and importer[1] == module[1]
        return importer[0] == "cli" or own or (importer[0] == "apps" and module[1] in SHARED)
    if importer[0] in ("cli", "apps", module[0]):
        return True
    return LIBRARY.index(module[0]) < LIBRARY.index(importer[0])  # in the library, imports go down


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_keep_the_three_rules(path):
    importer = path.relative_to(PACKAGE).with_suffix("").parts
    for module in imported(path):
        assert may_import(importer, tuple(module.split(".")[1:])), f"{'.'.join(importer)} imports {module}"


def test_no_class_has_the_name_of_another():
    trees = [ast.parse(path.read_text()) for path in FILES]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_every_package_has_its_place():
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} == {*LIBRARY, "apps", "cli"}


def test_a_wrong_import_would_be_seen(tmp_path):
    climbing = tmp_path / "masking.py"
    climbing.write_text("def late():\n    from adlm.methods import mdlm\n")
    assert imported(climbing) == ["adlm.methods"]
    assert not may_import(("diffusion", "masking"), ("methods",))
    assert not may_import(("language_model",), ("apps", "trace", "page"))
    assert not may_import(("apps", "judge", "pipeline"), ("apps", "paper", "results"))
    assert not may_import(("apps", "judge", "pipeline"), ("cli", "console"))
    assert may_import(("apps", "server", "app"), ("apps", "trace", "page"))


def test_documented_import_paths_of_moved_modules_stay():
    import adlm.harness
    import adlm.trace.page
    from adlm.evaluation.generation.diversity import entropy_of

    from adlm.apps import harness
    from adlm.apps.trace import page

    assert adlm.harness is harness
    assert adlm.trace.page is page
    assert entropy_of.__module__ == "adlm.apps.judge.diversity"
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import adlm.trace.nothing


def test_diffusion_depends_on_no_network_config_or_file():
    for path in (PACKAGE / "diffusion").glob("*.py"):
        assert not {module.split(".")[1] for module in imported(path)} - {"diffusion", "errors"}
        assert "nn.Module" not in path.read_text()


def test_only_the_command_line_prints():
    for path in FILES:
        if (
            path.relative_to(PACKAGE).parts[:2] != ("apps", "trace") and path.relative_to(PACKAGE).parts[0] != "cli"
        ):  # trace draws on the console that it is given
            assert not [word for word in (" print(", "sys.stdout.write", "from rich") if word in path.read_text()], path


def test_pydantic_stays_in_config_and_in_the_requests_of_the_server():
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != "config" and path.name != "bodies.py":
            assert "pydantic" not in path.read_text(), path


def test_git_ignores_what_the_commands_of_the_docs_write():
    written = [
        "prepared/own/manifest.json",
        "samples/own.jsonl",
        "cards/own.json",
        "runs/own/metrics.jsonl",
        "exported/own/config.json",
    ]
    asked = subprocess.run(
        ["git", "check-ignore", *written, "experiments/generation/cards/ar.json"],
        cwd=PACKAGE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode == 128:
        pytest.skip("not a git repository")
    assert asked.stdout.split() == written
