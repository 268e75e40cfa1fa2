"""Properties of progress where there is no terminal."""

import re
import time

import pytest

from adlm.cli import console
from adlm.cli.console import Console, Progress, duration


def printed(capsys, pattern):
    """Wait until something like this is printed."""
    told, begun = "", time.monotonic()
    while time.monotonic() - begun < 5:
        told += capsys.readouterr().err
        if re.search(pattern, told):
            return told
        time.sleep(0.01)
    pytest.fail(f"no {pattern} in {told!r}")


def test_a_long_step_is_not_silent_and_progress_comes_by_seconds(capsys, monkeypatch):
    monkeypatch.setattr(console, "SILENCE", 0.05)
    progress = Progress(Console(stderr=True), "training", 4)
    printed(capsys, r"training: 0/4 steps, .* s in the next")
    for done in range(1, 4):
        progress.update(done)
    assert re.fullmatch(r".* s left", progress.left)
    printed(capsys, r"training: 3/4 steps")
    progress.close()
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.123, "0.12 s"), (12.3, "12 s"), (119, "119 s"), (130, "2 min"), (9000, "2 h"), (86_400 * 20, "20 d")],
)
def test_a_duration_is_told_in_its_unit(seconds, told):
    assert duration(seconds) == told
