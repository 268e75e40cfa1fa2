"""Tests of shell completion: what a shell is told for a command line, without importing torch."""

import os
import subprocess
import sys

import pytest

from adlm.cli.main import COMMANDS, main


def completions(line, folder):
    """The words that a shell is offered for the command line, and standard error."""
    script = """
import os, sys
exit_process = os._exit
def checking_exit(code):
    exit_process(3 if "torch" in sys.modules else code)
os._exit = checking_exit
from adlm.cli.main import main
main()
"""
    out = folder / "completions"
    environment = {
        **os.environ,
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n=:",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "_ARGCOMPLETE_IFS": "\n",
    }
    process = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, check=False)
    assert process.returncode == 0, "3: torch was imported"
    return [word.strip() for word in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("adlm tr", ["train"]),
        ("adlm train ow", ["own", "owt/adlm"]),
        ("adlm train own train.st", ["train.steps="]),
        ("adlm presets owt/adlm method=", ["adlm", "mdlm"]),
        ("adlm train owt/adlm model=s", ["small"]),
        ("adlm train --out new ow", ["own"]),
        ("adlm presets --ex", ["--explain"]),
        ("adlm bench ", ["train", "sample"]),
        ("adlm bench train --st", ["--steps"]),
        ("adlm sample model --sampler remdm-c", ["remdm-cap", "remdm-conf"]),
        ("adlm sample model sampling.top", ["sampling.top_k=", "sampling.top_p="]),
        ("adlm sample book", ["book.txt"]),
        ("adlm completion z", ["zsh"]),
    ],
)
def test_a_command_line_is_completed(line, expected, tmp_path):
    (tmp_path / "book.txt").touch()
    (tmp_path / "other.txt").touch()
    found = completions(line, tmp_path)
    prefix = line.replace("=", " ").split(" ")[-1]
    assert set(expected) <= set(found)
    assert all(word.startswith(prefix) for word in found)


def test_every_command_is_completed(tmp_path):
    assert completions("adlm ", tmp_path) == list(COMMANDS)


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
