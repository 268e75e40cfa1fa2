"""Tests of `adlm doctor`: one line per check, remedies, and exit code 1 only if adlm itself does not work."""

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import torch

from adlm import hub
from adlm.cli import doctor
from adlm.cli.doctor import FEATURES, check_environment
from adlm.cli.main import main


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def unreachable(*address, **options):
        raise socket.gaierror("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.delenv("ADLM_DATA", raising=False)


def report(capsys):
    code = main(["doctor", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] == (code == 0)
    return {check["name"]: check for check in content["checks"]}


def test_every_check_is_a_line_with_a_mark(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    checked = [line for line in lines if re.match(r"  [✓-] \S", line)]
    assert len(checked) == 10 + len(FEATURES)
    assert lines[-1].startswith("adlm works here; ")


def test_the_machine_is_described(capsys):
    checks = report(capsys)
    assert checks["packages"]["facts"]["torch"] == torch.__version__
    assert checks["device"]["facts"]["gpus"] == [] or torch.cuda.is_available()
    assert checks["attention"]["facts"]["math"]
    assert checks["training"]["status"] == "ok"
    assert checks["memory"]["facts"]["total_bytes"] > 0
    assert checks["disk"]["facts"]["free_bytes"] > 0
    assert "not reachable" in checks["hub"]["detail"]


def test_a_missing_optional_package_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name, *rest: None if name == "mauve" else find_spec(name, *rest)
    )
    assert main(["doctor"]) == 0
    assert re.search(
        r"^  - judge --metrics mauve +needs mauve: pip install 'adlm\[eval\]'$", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("numpy>=99.5", r"numpy \S+ is older than 99\.5"),
        ("no_such_package>=1.0", r"no_such_package cannot be imported \(No module named 'no_such_package'\)"),
    ],
)
def test_a_broken_required_package_is_exit_code_1_with_its_remedy(capsys, monkeypatch, requirement, problem):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [requirement, "nothing>=1; extra == 'data'"])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(problem, printed)
    assert f"pip install --upgrade '{requirement}'" in printed
    assert "adlm does not work here" in printed


def test_a_failing_training_step_is_exit_code_1(capsys, monkeypatch):
    def fail(*given):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr("adlm.training.step.train_step", fail)
    assert main(["doctor"]) == 1
    assert "a step of a small model fails on" in (out := capsys.readouterr().out)
    assert "no kernel image is available" in out


def test_a_gpu_that_cannot_be_used_is_exit_code_1(capsys, monkeypatch):
    def fail(*given):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    assert main(["doctor"]) == 1
    assert "GPU 0 cannot be used: CUDA error: out of memory" in capsys.readouterr().out


def test_corpora_are_found_in_adlm_data(capsys, monkeypatch, tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    monkeypatch.setenv("ADLM_DATA", str(tmp_path))
    assert report(capsys)["corpora"]["facts"]["corpora"]["wikitext2"] == str(tmp_path / "wikitext-2")
    monkeypatch.setenv("ADLM_DATA", str(tmp_path / "nowhere"))
    assert "is not a folder" in report(capsys)["corpora"]["detail"]


def test_a_hub_that_never_answers_delays_the_report_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.2)
    monkeypatch.setattr(hub, "why_unreachable", lambda: time.sleep(600))
    started = time.monotonic()
    [found] = [check for check in check_environment() if check.name == "hub"]
    assert "no answer within 0.2 s" in found.detail
    assert time.monotonic() - started < 300


def test_the_marks_are_ascii_where_the_encoding_is():
    script = """
from adlm.cli.console import Console
from adlm.cli.doctor import Check, _print_check
_print_check(Console(), Check("core", "packages", "ok", "here"))
_print_check(Console(), Check("core", "packages", "broken", "gone"))
"""
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, check=True)
    assert process.stdout == b"  ok packages   here\n  NO packages   gone\n"
