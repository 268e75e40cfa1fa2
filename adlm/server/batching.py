"""Batches of canvas rows from concurrent requests, run by one thread per model. Independent of HTTP and of text.

A batch holds rows with equal sampling options and equal padded length, and the network always reads `batch` rows. A
row's tokens then depend on its canvas, seed and row number, not on the other rows (`LanguageModel.with_fixed_batch`).

Shapes: B rows, L tokens.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from adlm.canvas import Canvas
from adlm.config.schema import Sampling
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame

SHORTEST = 32  # tokens of the smallest batch; longer ones are padded to a power of two
LONGEST_RETRY = 60  # seconds
log = logging.getLogger("adlm.server")


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

    def key(self, lm: LanguageModel) -> tuple[Sampling, int, int]:
        """Rows with equal keys can share a batch: options, padded length and, for causal models, length of the prompt.

        Causal models read the prompt in one call, whose shape would otherwise depend on the other rows.
        """
        length = min(lm.config.length, max(SHORTEST, 1 << (len(self.ids) - 1).bit_length()))
        return self.sampling, length, self.ids.index(lm.mask_id) if lm.method.causal else 0

    def check(self, lm: LanguageModel) -> None:
        """A user error if the model cannot sample this row."""
        lm.run_sampler(_padded_canvas([self], len(self.ids), lm.fill_id), self.sampling, self.seed)


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


@dataclass(eq=False)
class Job:
    """The rows of one request."""

    rows: Sequence[CanvasRow]
    notify: Callable[[RowUpdate], None]
    """Called from the worker's thread."""
    streams: bool = False
    """Whether prefixes are reported while a row is sampled."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def key(self, row: int, lm: LanguageModel) -> Hashable:
        return self.rows[row].key(lm)

    def refuse(self, row: int, error: str) -> None:
        self.notify(RowUpdate(row, [], error=error))


@dataclass(eq=False)
class Task:
    """Work of one request that runs alone on the model's thread. It waits in the queue as one row."""

    work: Callable[[], Iterator[Any]]
    """Called on the thread; it ends early if the task is cancelled between two of its results."""
    notify: Callable[[Any], None]
    """Called with every result, from the worker's thread."""
    fail: Callable[[str], None]
    """Called with the reason if the work is not completed."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    num_rows: int = 1

    def key(self, row: int, lm: LanguageModel) -> Hashable:
        return self  # equal to no other

    def refuse(self, row: int, error: str) -> None:
        self.fail(error)

    def run(self) -> None:
        for result in self.work():
            if self.cancelled.is_set():
                return
            self.notify(result)


Item = tuple[Job | Task, int]
"""What waits in the queue: a job or task, and the number of its row."""


class QueueFull(Exception):
    """Too many rows are waiting; `retry_after` is an estimate in seconds."""

    def __init__(self, num_waiting: int, retry_after: int):
        super().__init__(f"{num_waiting} completions are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class ShuttingDown(Exception):
    """The server accepts no more rows."""


class Monitor(Protocol):
    """What a worker reports about its work."""

    def queue_changed(self, model: str, num_rows: int) -> None: ...
    def batch_done(self, model: str, num_rows: int, seconds: float) -> None: ...


class BatchWorker:
    """The queue of a model and the thread that samples from it. Rows wait at most for the batch that is running."""

    def __init__(self, name: str, lm: LanguageModel, batch: int, max_waiting: int, monitor: Monitor):
        self.name, self.lm, self.batch, self.max_waiting = name, lm.with_fixed_batch(batch), batch, max_waiting
        self._monitor = monitor
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._batch_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name=f"adlm-{name}", daemon=True)

    def start(self) -> None:
        _ = self.lm.frozen  # built once, before requests in other threads are checked
        self._thread.start()

    def submit(self, job: Job | Task) -> None:
        """Append the rows of a job, or a task, to the queue."""
        with self._changed:
            if self._stopping:
                raise ShuttingDown("the server is shutting down")
            if len(self._waiting) + job.num_rows > self.max_waiting:
                estimate = round(len(self._waiting) / self.batch * self._batch_seconds)
                raise QueueFull(len(self._waiting), min(max(1, estimate), LONGEST_RETRY))
            self._waiting.extend((job, row) for row in range(job.num_rows))
            self._report_queue()
            self._changed.notify()

    def cancel(self, job: Job | Task) -> None:
        """Drop the rows of a job that have not begun; a batch of cancelled rows only ends at the next frame."""
        job.cancelled.set()
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item[0] is not job)
            self._report_queue()

    def stop(self) -> None:
        """Finish the running batch; waiting rows are refused."""
        with self._changed:
            self._stopping = True
            refused, self._waiting = self._waiting, deque()
            self._report_queue()
            self._changed.notify()
        for job, row in refused:
            job.refuse(row, "the server is shutting down")

    def join(self) -> None:
        self._thread.join()

    def _report_queue(self) -> None:
        self._monitor.queue_changed(self.name, len(self._waiting))

    def _run(self) -> None:
        while batch := self._next_batch():
            started = time.monotonic()
            try:
                if isinstance(task := batch[0][0], Task):
                    task.run()
                else:
                    self._sample(cast(list[tuple[Job, int]], batch))
            except Exception as error:  # the thread must survive; the log has the traceback
                message = str(error) if isinstance(error, UserError) else "sampling failed"
                fields = {"model": self.name, "message": str(error)}  # of ids, not of text
                log.error("batch failed", extra={"fields": fields}, exc_info=error)
                for job, row in batch:
                    job.refuse(row, message)
            seconds = time.monotonic() - started
            self._batch_seconds = seconds
            self._monitor.batch_done(self.name, len(batch), seconds)

    def _next_batch(self) -> list[Item]:
        """The oldest row and those that can share its batch, as soon as there are any; [] at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            chosen: list[Item] = []
            left: deque[Item] = deque()
            first = self._key(self._waiting[0]) if self._waiting else None
            for item in self._waiting:
                fits = len(chosen) < self.batch and self._key(item) == first
                (chosen if fits else left).append(item)
            self._waiting = left
            self._report_queue()
            return chosen

    def _key(self, item: Item) -> Hashable:
        job, row = item
        return job.key(row, self.lm)

    def frames(self, rows: Sequence[CanvasRow]) -> Iterator[Frame]:
        """The sampling run of rows with equal keys, at most `batch`; only for the worker's thread."""
        _, length, _ = rows[0].key(self.lm)
        if self.lm.method.causal:  # a KV cache has a fixed number of rows
            rows = [*rows, *[rows[0]] * (self.batch - len(rows))]
        return self.lm.run_sampler(
            _padded_canvas(rows, length, self.lm.fill_id),
            rows[0].sampling,
            rng_rows=[row.number for row in rows],
            rng_seeds=[row.seed for row in rows],
        )

    def _sample(self, batch: list[tuple[Job, int]]) -> None:
        rows = [job.rows[row] for job, row in batch]
        frames = self.frames(rows)
        num_reported = [0] * len(batch)
        last: Frame | None = None
        for last in frames:
            if all(job.cancelled.is_set() for job, _ in batch):
                return
            self._report_prefixes(last, batch, num_reported)
        assert last is not None
        if not last.chance.isfinite().all():
            raise UserError("the model's beliefs are not finite: its weights are damaged or its precision is too low")
        ids, chance = last.ids.tolist(), last.chance.tolist()
        for index, (job, row) in enumerate(batch):
            end = len(rows[index].ids)
            job.notify(RowUpdate(row, ids[index][:end], chance[index][:end]))

    def _report_prefixes(self, frame: Frame, batch: list[tuple[Job, int]], num_reported: list[int]) -> None:
        """Report the tokens before the first mask of streamed rows, if there are more than before."""
        for index, (job, row) in enumerate(batch):
            if job.streams and not job.cancelled.is_set():
                ids: Tensor = frame.ids[index, : len(job.rows[row].ids)]
                num_known = int((ids != self.lm.mask_id).long().cumprod(dim=0).sum())
                if num_known > num_reported[index]:
                    num_reported[index] = num_known
                    job.notify(RowUpdate(row, ids[:num_known].tolist()))


def _padded_canvas(rows: Sequence[CanvasRow], length: int, filling: int) -> Canvas:
    """(B, length), with a padding mask even where nothing is padded: attention without a mask is another kernel."""
    ids = torch.full((len(rows), length), filling)
    pad = torch.ones(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        pad[number, : len(row.ids)] = False
    return Canvas(ids, pad, tuple(row.start for row in rows))
