"""Consoles and progress for the commands. Does not depend on any command.

Everything is printed as plain text: no markup, and characters that could control the terminal are escaped.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.segment import Segment

from adlm.cli.streams import StandardError
from adlm.errors import printable

UNLIMITED_WIDTH = 1_000_000
"""Columns where the output is not a terminal: no line is cut or wrapped."""


class Console(RichConsole):
    """A rich console on standard output or standard error that prints plain text."""

    def __init__(self, stderr: bool = False):
        file = cast(TextIO, StandardError()) if stderr else None
        super().__init__(file=file, stderr=stderr, markup=False, highlight=False)
        if not self.file.isatty():  # with FORCE_COLOR, rich treats a pipe as a terminal
            self.width = UNLIMITED_WIDTH

    @property
    def is_live(self) -> bool:
        """Whether lines can be redrawn, as progress bars do: a terminal, and not one that is dumb (TERM=dumb)."""
        return self.file.isatty() and not self.is_dumb_terminal

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """`main` ends the command when standard output has no reader."""
        raise BrokenPipeError


PROGRESS_INTERVAL = 10.0
"""Seconds between progress lines where there is no live bar."""
ESTIMATE_AFTER, LONG = 1.0, 60.0
"""Seconds into a stage after which its duration is estimated, and the duration from which it is worth a line."""


class Progress:
    """How many of `total` steps are done: a live bar on a terminal, otherwise a line every 10 seconds without output.

    A thread prints the lines, so progress also appears during a step that takes minutes.
    """

    def __init__(self, console: Console, label: str, total: int, done: float = 0, unit: str = "steps"):
        self.console, self.label, self.total, self.unit = console, label, total, unit
        self._started_at = self._printed_at = time.monotonic()
        # (steps done, time) after the first step, which is too slow to count, and now
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] = (done, self._started_at)
        self._closed = threading.Event()
        self._bar: Bar | None = None
        if console.is_live:
            name = TextColumn("{task.description}", markup=False)
            status = TextColumn("{task.fields[status]}", markup=False)
            self._bar = Bar(name, BarColumn(), status, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task(label, total=total, completed=int(done), status=self.count)
            self._bar.start()
        self._thread = threading.Thread(target=self._print_lines, daemon=True)
        self._thread.start()

    def print(self, line: str, style: str | None = None) -> None:
        self._printed_at = time.monotonic()
        self.console.print(line, style=style, soft_wrap=True)

    def update(self, done: float) -> None:
        self._last = (done, time.monotonic())
        if self._first is None:
            self._first = self._last
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=f"{self.count}  {self.left}")

    @property
    def count(self) -> str:
        """Whole steps done, of all."""
        return f"{int(self._last[0]):,}/{self.total:,}"

    @property
    def seconds_per_step(self) -> float | None:
        """Including the work between steps; None before the first step."""
        (done, now), first = self._last, self._first
        if first is None:
            return None
        return (now - first[1]) / (done - first[0]) if done > first[0] else now - self._started_at

    @property
    def left(self) -> str:
        """The estimated remaining time; empty before the first step."""
        seconds = self.seconds_per_step
        return "" if seconds is None else f"{duration((self.total - self._last[0]) * seconds)} left"

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started_at

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while something is printed on standard output."""
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

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print_lines(self) -> None:
        while self._bar is None and not self._closed.wait(PROGRESS_INTERVAL / 10):
            now = time.monotonic()
            if now - self._printed_at < PROGRESS_INTERVAL:
                continue
            done, since = self._last
            where = "in the next one" if done < self.total else "after the last one"
            status = f"{duration(now - since)} {where}" if now - since > PROGRESS_INTERVAL else self.left
            self.print(f"{self.label}: {self.count} {self.unit}{f', {status}' if status else ''}")


class Stages:
    """Progress of consecutive stages on standard error, each with its own name and total.

    `limit` is the option for a smaller total. The duration of a long stage is printed once, with a value for it.
    """

    def __init__(self, unit: str, enabled: bool = True, limit: str = ""):
        self._unit, self._enabled, self._limit = unit, enabled, limit
        self._progress: Progress | None = None
        self._is_estimated = False

    def update(self, name: str, done: float, total: int, unit: str = "") -> None:
        if not self._enabled:
            return
        if self._progress is None or self._progress.label != name:
            self.close()
            self._progress = Progress(Console(stderr=True), name, total, done, unit or self._unit)
            self._is_estimated = not self._limit or bool(unit)
        self._progress.update(done)
        if not self._is_estimated and self._progress.seconds > ESTIMATE_AFTER:
            self._print_estimate(self._progress, total - done)
            self._is_estimated = True

    def _print_estimate(self, progress: Progress, left: float) -> None:
        seconds = progress.seconds_per_step or 0.0
        if left * seconds > LONG:
            fewer = int(float(f"{60 / seconds:.0e}"))
            progress.print(
                f"{progress.label}: about {duration(left * seconds)} for {progress.total:,} {progress.unit}; "
                f"{self._limit} {fewer} takes about a minute"
            )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    """A rounded duration in days, hours, minutes or seconds."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
