"""Standard output and standard error for commands, and progress. Knows no command.

Everything printed here is plain text: no markup, and characters that could control the terminal are escaped.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.segment import Segment

from adlm.errors import printable

NO_EDGE = 1_000_000
"""Columns of what is no terminal: nothing is cut or folded there, whoever reads it has a width of his own."""


def open_streams() -> None:
    """Make standard output and error usable: closed ones lead nowhere, and what their encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Nobody reads this stream any more: what is written to it, and what Python flushes at exit, goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_error(line: str) -> None:
    """A line on standard error; a reader that has gone away is no reason to fail."""
    try:
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


class Console(RichConsole):
    """Standard output, or standard error."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, highlight=False)
        if not self.file.isatty():  # rich calls a pipe a terminal where FORCE_COLOR is set
            self.width = NO_EDGE

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:  # standard error is a terminal that was closed, or a file on a full disk
            if not self.stderr:
                raise
            del self._buffer[:]
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Without a reader of standard output, `main` ends the command; of standard error, it goes on in silence."""
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        silence(sys.stderr)


SILENCE = 10.0
"""Seconds after which progress is printed where there is no live bar."""


class Progress:
    """How many of `total` steps are done: a live bar on a terminal, elsewhere a line after 10 seconds of silence.

    A thread prints it, so that one step of minutes is not silent either.
    """

    def __init__(self, console: Console, what: str, total: int, done: int = 0):
        self.console, self.what, self.total = console, what, total
        self._began = self._printed = time.monotonic()
        self._first: tuple[int, float] | None = None  # (steps done, when) after the first step, which is no measure
        self._last = (done, self._began)
        self._closed = threading.Event()
        self._bar: Bar | None = None
        if console.is_terminal:
            left = TextColumn("{task.completed:,}/{task.total:,}  {task.fields[left]}")
            self._bar = Bar(TextColumn(what), BarColumn(), left, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task(what, total=total, completed=done, left="")
            self._bar.start()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()

    def print(self, line: str, style: str | None = None) -> None:
        self._printed = time.monotonic()
        self.console.print(line, style=style, soft_wrap=True)

    def update(self, done: int) -> None:
        self._last = (done, time.monotonic())
        if self._first is None:
            self._first = self._last
        if self._bar is not None:
            self._bar.update(self._task, completed=done, left=self.left)

    @property
    def left(self) -> str:
        """About how long the rest takes, all that happens between two steps included; empty where nobody knows."""
        (done, now), first = self._last, self._first
        if first is None:
            return ""
        pace = (now - first[1]) / (done - first[0]) if done > first[0] else now - self._began
        return f"{duration((self.total - done) * pace)} left"

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def _speak(self) -> None:
        while self._bar is None and not self._closed.wait(SILENCE / 10):
            now = time.monotonic()
            if now - self._printed < SILENCE:
                continue
            done, since = self._last
            doing = f"{duration(now - since)} in the next" if now - since > SILENCE else self.left
            self.print(f"{self.what}: {done:,}/{self.total:,} steps, {doing}")


def duration(seconds: float) -> str:
    """About, in the unit that suits it."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
