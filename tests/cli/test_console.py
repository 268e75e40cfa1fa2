"""Tests of progress output where there is no terminal."""

import re
import time

import pytest

from adlm.cli import console
from adlm.cli.console import Console, Progress, duration


def wait_for(capsys, pattern):
    """Wait until standard error matches the pattern."""
    printed, started_at = "", time.monotonic()
    while time.monotonic() - started_at < 5:
        printed += capsys.readouterr().err
        if re.search(pattern, printed):
            return printed
        time.sleep(0.01)
    pytest.fail(f"no {pattern} in {printed!r}")


def test_progress_is_printed_at_intervals_and_during_a_long_step(capsys, monkeypatch):
    monkeypatch.setattr(console, "PROGRESS_INTERVAL", 0.05)
    progress = Progress(Console(stderr=True), "training", 4)
    wait_for(capsys, r"training: 0/4 steps, .* s in the next")
    for done in range(1, 4):
        progress.update(done)
    assert re.fullmatch(r".* s left", progress.left)
    wait_for(capsys, r"training: 3/4 steps")
    progress.close()
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (12.3, "12 s"), (119, "119 s"), (130, "2 min"), (9000, "2 h"), (86_400 * 20, "20 d")],
)
def test_a_duration_is_formatted_in_a_suitable_unit(seconds, text):
    assert duration(seconds) == text
