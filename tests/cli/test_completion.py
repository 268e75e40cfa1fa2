"""Tests of shell completion: what a shell is told for a command line, without importing torch."""

import json
import os
import subprocess
import sys

import pytest

from adlm.cli.main import COMMANDS, main

# One process imports the command line and forks for each line to complete; 3: torch was imported.
SCRIPT = """
import json, os, sys
from adlm.cli.main import main
exit_process = os._exit
def checking_exit(code):
    exit_process(3 if "torch" in sys.modules else code)
os._exit = checking_exit
for number, line in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.environ.update(COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_STDOUT_FILENAME=f"offered-{number}")
        main()
    _, status = os.wait()
    assert status == 0, (line, status)
"""
LINES = {
    "adlm tr": ["train"],
    "adlm train ow": ["own", "owt/adlm"],
    "adlm train own train.st": ["train.steps="],
    "adlm presets owt/adlm method=": ["adlm", "mdlm"],
    "adlm train owt/adlm model=s": ["small"],
    "adlm train --out new ow": ["own"],
    "adlm presets --ex": ["--explain"],
    "adlm bench ": ["train", "sample"],
    "adlm bench train --st": ["--steps"],
    "adlm sample model --sampler remdm-c": ["remdm-cap", "remdm-conf"],
    "adlm sample model sampling.top": ["sampling.top_k=", "sampling.top_p="],
    "adlm sample book": ["book.txt"],
    "adlm completion z": ["zsh"],
}


def test_command_lines_are_completed_without_importing_torch(tmp_path):
    for name in ("book.txt", "other.txt"):
        (tmp_path / name).touch()
    bash = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n"}
    environment = {**os.environ, **bash, "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n=:"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([*LINES, "adlm "])]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    *offered, commands = (
        [word.strip() for word in (tmp_path / f"offered-{number}").read_text().splitlines()]
        for number in range(len(LINES) + 1)
    )
    assert commands == list(COMMANDS)
    for (line, expected), found in zip(LINES.items(), offered, strict=True):
        prefix = line.replace("=", " ").split(" ")[-1]
        assert set(expected) <= set(found), line
        assert all(word.startswith(prefix) for word in found), line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_every_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_the_bash_script_asks_adlm(tmp_path, capsys):
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    adlm = tmp_path / "adlm"
    adlm.write_text(f'#!/bin/sh\nexec {sys.executable} -m adlm "$@"\n')
    adlm.chmod(0o755)
    shell = f"""
PATH={tmp_path}:$PATH
source {tmp_path}/script
COMP_LINE="adlm presets owt/adlm train.st" COMP_TYPE=9
COMP_POINT=${{#COMP_LINE}}
_python_argcomplete adlm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    process = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert process.stdout == "train.steps=\n", process.stderr
