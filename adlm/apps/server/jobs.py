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
from adlm.language_model import LanguageModel, Run
from adlm.sampling.events import PositionsFirst
from adlm.sampling.rng import RowRng

SHORTEST = 32  # tokens of the shortest rows; longer ones are padded to a power of two


class BatchKey(NamedTuple):
    """Rows with equal keys can share a batch."""

    joins: bool
    """Whether rows may join a batch that has begun."""
    group: Hashable


@dataclass(frozen=True)
class RowUpdate:
    """What is known of one row of a job: a prefix, the complete row, or why it will not be completed."""

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

    rows: Sequence[Run]
    """Runs of one row, planned by the model of the worker."""
    notify: Callable[[RowUpdate], None]
    """Called from the worker's thread."""
    streams: bool = False
    """Whether prefixes are reported while a row is sampled."""

    def keys(self, lm: LanguageModel) -> list[BatchKey]:
        """Causal models read the prompt in one call, whose shape would depend on rows with prompts of other lengths."""
        if isinstance(self.rows[0].generate(), PositionsFirst):
            return [BatchKey(True, padded_length(row)) for row in self.rows]
        given = [row.canvas.ids[0].tolist().index(lm.mask_id) if lm.method.causal else 0 for row in self.rows]
        lengths = [padded_length(row) for row in self.rows]
        sampling = self.rows[0].sampling
        return [BatchKey(False, (sampling, *shape)) for shape in zip(lengths, given, strict=True)]

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
    def run(self) -> Run:
        return cast(Job, self.job).rows[self.row]

    @property
    def num_tokens(self) -> int:
        return self.run.canvas.ids.shape[1]


def padded_length(row: Run) -> int:
    """The length that a row is padded to: the next power of two, at most the model's."""
    return min(row.lm.config.length, max(SHORTEST, 1 << (row.canvas.ids.shape[1] - 1).bit_length()))


def together(rows: Sequence[Run]) -> Run:
    """Rows of equal padded length and sampling options as one run, with a padding mask even where nothing is padded:
    attention without a mask is another kernel."""
    lm, length = rows[0].lm, padded_length(rows[0])
    ids = torch.full((len(rows), length), lm.fill_id)
    pad = torch.ones(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        own = row.canvas.ids.shape[1]
        ids[number, :own] = row.canvas.ids[0]
        pad[number, :own] = False
    rng = RowRng([cast(int, row.rng.seed) for row in rows], [row.rng.rows[0] for row in rows])
    return Run(lm, Canvas(ids, pad), rows[0].sampling, rng)
