"""The Slurm examples are bash, and name only presets, options and commands that there are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from adlm.cli.main import COMMANDS
from adlm.config.load import preset_titles, resolve

FOLDER = Path(__file__).parent.parent.parent / "examples" / "slurm"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_scripts_name_what_there_is(script):
    text = script.read_text()
    options = re.findall(r"\b(?:train|anchor|model|data)\.\w+=[\w.]+", text)
    resolve(["owt/adlm", *options])
    presets = {word for word in re.findall(r"\b(?:owt|lm1b)/\w+", text) if not word.startswith("prepared")}
    loops = re.findall(r"for method in ([\w ]+);", text)
    corpus = script.stem
    presets |= {f"{corpus}/{method}" for names in loops for method in names.split()}
    assert presets <= preset_titles().keys()
    assert set(re.findall(r"(?:cli|adlm) (train|prepare|\w+) \"\$preset\"", text)) <= COMMANDS.keys()
