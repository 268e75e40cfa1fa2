"""Laws of the house: each floor imports only lower floors, and no room is a store-room."""

import ast
import subprocess
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "adlm"

# The map of docs/architecture.md. Files of one room may import each other; rooms of one floor may not.
FLOORS = {
    "errors": 0,
    "files": 1,
    "reach": 1,
    "config": 2,
    "pickles": 2,
    "tokens": 3,
    "diffusion": 3,
    "models": 3,
    "samples_file": 3,
    "canvas": 4,
    "data": 4,
    "sampling": 4,
    "methods": 5,
    "limits": 6,
    "model_folder": 6,
    "published": 7,
    "evaluation": 8,
    "language_model": 9,
    "training": 9,
    "interfaces": 10,
}
FILES = sorted(path for path in HOUSE.rglob("*.py") if path != HOUSE / "__init__.py")


def room(module: str) -> str:
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_go_down(path):
    here = path.relative_to(HOUSE).parts[0].removesuffix(".py")
    for module in imported(path):
        there = room(module)
        assert there == here or FLOORS[there] < FLOORS[here], f"{here} (floor {FLOORS[here]}) imports {module}"


def test_every_room_is_on_the_map():
    assert {path.relative_to(HOUSE).parts[0].removesuffix(".py") for path in FILES} == set(FLOORS)


def test_a_climbing_import_would_be_seen(tmp_path):
    climbing = tmp_path / "masking.py"
    climbing.write_text("def late():\n    from adlm.methods import mdlm\n")
    assert imported(climbing) == ["adlm.methods"]
    assert FLOORS[room("adlm.methods")] > FLOORS["diffusion"]


def test_the_mathematics_needs_no_network_no_knobs_and_no_files():
    for path in (HOUSE / "diffusion").glob("*.py"):
        assert not {room(module) for module in imported(path)} - {"diffusion", "errors"}
        assert "nn.Module" not in path.read_text()


def test_pydantic_stays_in_config():
    for path in FILES:
        if path.relative_to(HOUSE).parts[0] != "config":
            assert "pydantic" not in path.read_text(), path


def test_git_ignores_what_the_commands_of_the_docs_write():
    written = ["prepared/own/manifest.json", "samples/own.jsonl", "cards/own.json", "runs/own/metrics.jsonl"]
    asked = subprocess.run(
        ["git", "check-ignore", *written, "experiments/generation/cards/ar.json"],
        cwd=HOUSE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode == 128:
        pytest.skip("not a git repository")
    assert asked.stdout.split() == written
