"""What waits in the queue of a model: canvas rows of completions, and other work. Independent of HTTP and of text.

Shapes: B rows, L tokens.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from adlm.canvas import Canvas
from adlm.config.schema import Sampling
from adlm.language_model import LanguageModel
from adlm.sampling.events import PositionsFirst
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng

SHORTEST = 32  # tokens of the shortest rows; longer ones are padded to a power of two


class BatchKey(NamedTuple):
    """Rows with equal keys can share a batch."""

    joins: bool
    """Whether rows may join a batch that has begun."""
    group: Hashable


@dataclass(frozen=True)
class CanvasRow:
    """One row to sample."""

    ids: tuple[int, ...]
    """With the mask id at the positions to fill."""
    start: int
    """Position of the first token of the text, after a bos that is not part of it."""
    seed: int
    number: int
    """The row number of the RNG, counted within the request."""
    sampling: Sampling

    def padded_length(self, lm: LanguageModel) -> int:
        return min(lm.config.length, max(SHORTEST, 1 << (len(self.ids) - 1).bit_length()))

    def frames(self, lm: LanguageModel) -> Iterator[Frame]:
        """The sampling run of this row alone."""
        canvas, rng = padded_canvas([self], self.padded_length(lm), lm.fill_id), RowRng(self.seed, [self.number])
        pad = None if canvas.pad is None else canvas.pad.to(lm.device)
        return lm.method.generate(lm.frozen, canvas.ids.to(lm.device), self.sampling, rng, pad)

    def key(self, lm: LanguageModel, joins: bool) -> BatchKey:
        """Causal models read the prompt in one call, whose shape would depend on rows with prompts of other lengths."""
        length = self.padded_length(lm)
        if joins:
            return BatchKey(True, length)
        return BatchKey(False, (self.sampling, length, self.ids.index(lm.mask_id) if lm.method.causal else 0))

    def check(self, lm: LanguageModel) -> None:
        """A user error if the model cannot sample this row."""
        lm.run_sampler(padded_canvas([self], len(self.ids), lm.fill_id), self.sampling, self.seed)


@dataclass(frozen=True)
class RowUpdate:
    """News of one row of a job."""

    row: int
    ids: list[int]
    """The ids of the text that no later step changes: a prefix, or all of them."""
    chance: list[float] | None = None
    """The probability each token was drawn with, once the row is complete."""
    error: str | None = None
    """Why the row will not be completed."""

    @property
    def complete(self) -> bool:
        return self.chance is not None


@dataclass(eq=False, kw_only=True)
class Work:
    """What a request asks of a model's thread."""

    client: str = ""
    """The address that the request came from."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    used: float = 0.0
    """Seconds of network calls so far."""


@dataclass(eq=False)
class Job(Work):
    """The rows of one request, which have equal sampling options."""

    rows: Sequence[CanvasRow]
    notify: Callable[[RowUpdate], None]
    """Called from the worker's thread."""
    streams: bool = False
    """Whether prefixes are reported while a row is sampled."""

    def keys(self, lm: LanguageModel) -> list[BatchKey]:
        joins = isinstance(self.rows[0].frames(lm), PositionsFirst)
        return [row.key(lm, joins) for row in self.rows]

    def refuse(self, row: int, error: str) -> None:
        self.notify(RowUpdate(row, [], error=error))


@dataclass(eq=False)
class Task(Work):
    """Work that makes its own network calls. It waits in the queue as one row."""

    work: Callable[[], Iterator[Any]]
    """Called on the thread; it ends early if the task is cancelled."""
    notify: Callable[[Any], None]
    """Called with every result, from the worker's thread."""
    fail: Callable[[str], None]
    """Called with the reason if the work is not completed."""

    def keys(self, lm: LanguageModel) -> list[BatchKey]:
        return [BatchKey(False, self)]  # equal to no other

    def refuse(self, row: int, error: str) -> None:
        self.fail(error)


@dataclass(eq=False)
class Item:
    """What waits in the queue and is sampled in a batch: a row of a job, or a task."""

    job: Job | Task
    row: int
    key: BatchKey
    arrival: float = field(default_factory=time.monotonic)
    num_reported: int = 0
    """Tokens of the prefix that was reported last."""

    @property
    def canvas_row(self) -> CanvasRow:
        return cast(Job, self.job).rows[self.row]


def padded_canvas(rows: Sequence[CanvasRow], length: int, filling: int) -> Canvas:
    """(B, length), with a padding mask even where nothing is padded: attention without a mask is another kernel."""
    ids = torch.full((len(rows), length), filling)
    pad = torch.ones(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        pad[number, : len(row.ids)] = False
    return Canvas(ids, pad, tuple(row.start for row in rows))
