"""The wheel: built from this tree, and used without it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import adlm

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    assert wheel.name.startswith(f"adlm-{adlm.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(unpacked: Path, *words: str) -> str:
    """What a fresh Python prints that imports adlm from the wheel only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"import sys; sys.path = [{str(unpacked)!r}] + [p for p in sys.path if p != {str(ROOT)!r}]; "
    code += "import adlm; from adlm.cli.main import main; print(adlm.__file__, file=sys.stderr); sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(unpacked) in done.stderr, "not the wheel"
    return done.stdout


def test_the_wheel_runs_and_has_its_data(unpacked):
    assert run(unpacked, "--version").strip() == f"adlm {adlm.__version__}"
    assert "owt/adlm" in run(unpacked, "presets")
    packaged = {path.relative_to(ROOT / "adlm") for path in (ROOT / "adlm").rglob("*") if path.is_file()}
    missing = [path for path in packaged if not (unpacked / "adlm" / path).exists() and "__pycache__" not in path.parts]
    assert not missing


@pytest.mark.slow
def test_the_wheel_samples_from_the_model_in_the_box(unpacked):
    assert run(unpacked, "sample", "--prompt", "The old man", "--length", "16", "--steps", "4").startswith(
        "The old man"
    )


def test_the_version_is_written_in_one_place():
    assert re.search(r'^dynamic = \["version"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == adlm.__version__
    assert f"## {adlm.__version__}" in (ROOT / "CHANGELOG.md").read_text()
