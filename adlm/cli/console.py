"""Standard output and standard error for commands, and progress. Knows no command.

Everything printed here is plain text: no markup, and characters that could control the terminal are escaped.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

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
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class StandardError:
    """Standard error as it is now. Where it cannot be written (a reader has gone, a disk is full), the work goes on."""

    @property
    def _stream(self) -> TextIO:
        found: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # itself, while rich shows a live bar
        return found

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


def write_error(line: str) -> None:
    """A line on standard error."""
    stream = StandardError()
    stream.write(f"{printable(line)}\n")
    stream.flush()


class Console(RichConsole):
    """Standard output, or standard error."""

    def __init__(self, stderr: bool = False):
        file = cast(TextIO, StandardError()) if stderr else None
        super().__init__(file=file, stderr=stderr, markup=False, highlight=False)
        if not self.file.isatty():  # rich calls a pipe a terminal where FORCE_COLOR is set
            self.width = NO_EDGE

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Without a reader of standard output, `main` ends the command."""
        raise BrokenPipeError


SILENCE = 10.0
"""Seconds after which progress is printed where there is no live bar."""


class Progress:
    """How many of `total` steps are done: a live bar on a terminal, elsewhere a line after 10 seconds of silence.

    A thread prints it, so that one step of minutes is not silent either.
    """

    def __init__(self, console: Console, what: str, total: int, done: float = 0, unit: str = "steps"):
        self.console, self.what, self.total, self.unit = console, what, total, unit
        self._began = self._printed = time.monotonic()
        self._first: tuple[float, float] | None = None  # (steps done, when) after the first step, which is no measure
        self._last: tuple[float, float] = (done, self._began)
        self._closed = threading.Event()
        self._bar: Bar | None = None
        if console.is_terminal:
            name = TextColumn("{task.description}", markup=False)
            left = TextColumn("{task.completed:,.0f}/{task.total:,}  {task.fields[left]}")
            self._bar = Bar(name, BarColumn(), left, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task(what, total=total, completed=int(done), left="")
            self._bar.start()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()

    def print(self, line: str, style: str | None = None) -> None:
        self._printed = time.monotonic()
        self.console.print(line, style=style, soft_wrap=True)

    def update(self, done: float) -> None:
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

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While something is printed on standard output."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None and not self._closed.is_set():
                self._bar.start()

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
            self.print(f"{self.what}: {done:,.0f}/{self.total:,} {self.unit}{f', {doing}' if doing else ''}")


class Stages:
    """Progress of one stage of work after another on standard error, each with a name and a total of its own."""

    def __init__(self, unit: str, shown: bool = True):
        self._unit, self._shown = unit, shown
        self._progress: Progress | None = None

    def tell(self, name: str, done: int, total: int) -> None:
        if not self._shown:
            return
        if self._progress is None or self._progress.what != name:
            self.close()
            self._progress = Progress(Console(stderr=True), name, total, done, self._unit)
        self._progress.update(done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    """About, in the unit that suits it."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
