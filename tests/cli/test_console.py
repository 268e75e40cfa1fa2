"""Tests of colours and progress: on a terminal, where there is none, and with NO_COLOR and FORCE_COLOR."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from adlm.cli import console
from adlm.cli.console import Console, Progress, Stages, duration


def wait_for(capsys, pattern):
    """Wait until standard error matches the pattern."""
    printed, started_at = "", time.monotonic()
    while time.monotonic() - started_at < 120:
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
    progress.update(4)
    wait_for(capsys, r"training: 4/4 steps, .* s after the last one")
    progress.close()
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_the_duration_of_a_long_stage_is_estimated_once_with_the_option_that_shortens_it(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with Stages("tokens", limit="--max-tokens") as stages:
        for done in (0, 100, 200, 300):
            stages.update("box on a.txt", done, 10_000)
            now += 2.0
        stages.update("tokenizing b.txt", 0, 10**9, "bytes")
    error = capsys.readouterr().err
    assert error == "box on a.txt: about 3 min for 10,000 tokens; --max-tokens 3000 takes about a minute\n"


def test_a_step_counts_only_once_it_is_done():
    """Sampling reports fractions of a sample."""
    progress = Progress(Console(), "sampling", 1, unit="samples")
    progress.update(0.98)
    assert progress.count == "0/1"
    progress.update(1)
    assert progress.count == "1/1"
    progress.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (12.3, "12 s"), (119, "119 s"), (130, "2 min"), (9000, "2 h"), (86_400 * 20, "20 d")],
)
def test_a_duration_is_formatted_in_a_suitable_unit(seconds, text):
    assert duration(seconds) == text


COLOUR = re.compile(rb"\x1b\[[\d;]*\b(3[0-7]|9[0-7]|38;)[\d;]*m")
SCRIPT = """
from adlm.cli.console import Console, Progress
progress = Progress(Console(stderr=True), "training", 4)
progress.update(2)
progress.print("a line", style="yellow")
progress.close()
Console().print("agrees", style="green")
"""


def printed(on_terminal, **variables):
    """What the script prints on a terminal, or on a pipe, both streams together."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    reader, writer = pty.openpty() if on_terminal else os.pipe()
    environment = {**plain, "TERM": "xterm-256color", **variables}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, stdout=writer, stderr=writer, check=True)
    output = os.read(reader, 65536)
    os.close(writer)
    os.close(reader)
    return output


@pytest.mark.parametrize(
    ("on_terminal", "variables", "colour", "bar"),
    [
        (True, {}, True, True),
        (True, {"NO_COLOR": "1"}, False, True),
        (True, {"TERM": "dumb"}, False, False),
        (False, {}, False, False),
        (False, {"FORCE_COLOR": "1"}, True, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colours_and_bars_are_for_terminals_only(on_terminal, variables, colour, bar):
    output = printed(on_terminal, **variables)
    assert b"a line" in output
    assert b"agrees" in output
    assert bool(COLOUR.search(output)) == colour
    assert (b"2/4" in output) == bar
    assert (b"\x1b[?25l" in output) == bar  # a bar hides the cursor
