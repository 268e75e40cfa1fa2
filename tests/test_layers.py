"""Layering: each layer imports only lower layers, and only the command line prints."""

import ast
import subprocess
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "adlm"

# The table of docs/architecture.md. Modules of one package may import each other; packages of one layer may not.
LAYERS = {
    "errors": 0,
    "registry": 1,
    "files": 1,
    "hub": 1,
    "version": 1,
    "config": 2,
    "distributed": 3,
    "tokens": 3,
    "diffusion": 3,
    "models": 3,
    "samples_file": 3,
    "canvas": 4,
    "data": 4,
    "sampling": 4,
    "inference": 4,
    "methods": 5,
    "limits": 6,
    "checkpoints": 6,
    "likelihood": 7,
    "training": 8,
    "language_model": 8,
    "reasoning": 9,
    "evaluation": 9,
    "benchmark": 9,
    "trace": 9,
    "harness": 9,
    "environment": 9,
    "server": 10,
    "quickstart": 10,
    "export": 10,
    "cli": 11,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.name.startswith("__"))


def package(module: str) -> str:
    """The first name below the package."""
    return module.split(".")[1]


def imported(path: Path) -> list[str]:
    """The modules of the package that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the whole path"
            names += [
                f"{node.module}.{alias.name}" if node.module == "adlm" else str(node.module) for alias in node.names
            ]
    return [name for name in names if name.startswith("adlm.") and name != "adlm.__version__"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_to_lower_layers(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported(path):
        there = package(module)
        assert there == here or LAYERS[there] < LAYERS[here], f"{here} (layer {LAYERS[here]}) imports {module}"


def test_every_package_has_a_layer():
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} == set(LAYERS)


def test_an_import_of_a_higher_layer_would_be_seen(tmp_path):
    climbing = tmp_path / "masking.py"
    climbing.write_text("def late():\n    from adlm.methods import mdlm\n")
    assert imported(climbing) == ["adlm.methods"]
    assert LAYERS[package("adlm.methods")] > LAYERS["diffusion"]


def test_diffusion_depends_on_no_network_config_or_file():
    for path in (PACKAGE / "diffusion").glob("*.py"):
        assert not {package(module) for module in imported(path)} - {"diffusion", "errors"}
        assert "nn.Module" not in path.read_text()


def test_only_the_command_line_prints():
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] not in ("cli", "trace"):  # trace draws on the console that it is given
            assert not [word for word in (" print(", "sys.stdout.write", "from rich") if word in path.read_text()], path


def test_pydantic_stays_in_config_and_in_the_requests_of_the_server():
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != "config" and path.name not in (
            "completion_request.py",
            "studio_request.py",
        ):
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
