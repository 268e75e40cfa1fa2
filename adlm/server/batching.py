"""Rows of concurrent requests in shared network calls, made by one thread per model. Independent of HTTP and of text.

Rows of equal padded length share the calls of one batch, whatever their sampling options: a row joins between two calls
as soon as a slot is free (`sampling/joining.py`). Rows of causal models, and of samplers that choose positions by the
network's output, begin together and run to the end. The network always reads `batch` rows, so that a row's tokens
depend on its canvas, seed and row number, not on the other rows (`LanguageModel.with_fixed_batch`).

Shapes: B rows, L tokens.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.events import PositionsFirst
from adlm.sampling.frame import NOT_FINITE, Frame, SamplingRun
from adlm.sampling.joining import JoinedRow, JoinedRows
from adlm.server.jobs import BatchKey, CanvasRow, Item, Job, RowUpdate, Task, padded_canvas

LONGEST_RETRY = 60  # seconds
log = logging.getLogger("adlm.server")


@dataclass(eq=False)
class Batch:
    """Items that share network calls."""

    items: list[Item]
    """Those that are not complete."""
    calls: Iterator[None]
    """Each `next` makes one network call; the end is the end of the batch."""
    has_begun: bool = False

    @property
    def oldest(self) -> float:
        """When its oldest item came; a batch without items can wait."""
        return min((item.arrival for item in self.items), default=math.inf)


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
    def running_changed(self, model: str, num_rows: int) -> None: ...
    def call_done(self, model: str, num_rows: int, seconds: float) -> None: ...


class BatchWorker:
    """The queue of a model and the thread that samples from it.

    There can be several batches: one of joining rows for each padded length, and at most one that rows cannot join. The
    next network call is for the batch with the oldest row, so that rows are finished in the order they came, roughly.
    """

    def __init__(self, name: str, lm: LanguageModel, batch: int, max_waiting: int, monitor: Monitor):
        self.name, self.lm, self.batch, self.max_waiting = name, lm.with_fixed_batch(batch), batch, max_waiting
        self._monitor = monitor
        self._waiting: deque[Item] = deque()
        self._running: dict[BatchKey, Batch] = {}  # only for the thread
        self._changed = threading.Condition()
        self._stopping = False
        self._busy_seconds, self._num_finished = 0.0, 0
        self._thread = threading.Thread(target=self._run, name=f"adlm-{name}", daemon=True)

    def start(self) -> None:
        _ = self.lm.frozen  # built once, before requests in other threads are checked
        self._thread.start()

    def submit(self, job: Job | Task) -> None:
        """Append the rows of a job, or a task, to the queue."""
        items = [Item(job, row, key) for row, key in enumerate(job.keys(self.lm))]
        with self._changed:
            if self._stopping:
                raise ShuttingDown("the server is shutting down")
            if len(self._waiting) + len(items) > self.max_waiting:
                estimate = round(len(self._waiting) * self._busy_seconds / max(1, self._num_finished))
                raise QueueFull(len(self._waiting), min(max(1, estimate), LONGEST_RETRY))
            self._waiting.extend(items)
            self._report_queue()
            self._changed.notify()

    def cancel(self, job: Job | Task) -> None:
        """Drop the rows of a job that have not begun; rows that have end at the next network call.

        Rows that began together with others end with them.
        """
        job.cancelled.set()
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item.job is not job)
            self._report_queue()

    def stop(self) -> None:
        """Finish what is running; waiting rows are refused."""
        with self._changed:
            self._stopping = True
            refused, self._waiting = self._waiting, deque()
            self._report_queue()
            self._changed.notify()
        for item in refused:
            item.job.refuse(item.row, "the server is shutting down")

    def join(self) -> None:
        self._thread.join()

    def _report_queue(self) -> None:
        self._monitor.queue_changed(self.name, len(self._waiting))

    def _run(self) -> None:
        while self._begin_waiting():
            key = min(self._running, key=lambda each: self._running[each].oldest)
            self._advance(key, self._running[key])

    def _begin_waiting(self) -> bool:
        """Put waiting rows where there is room, oldest first. Waits for work; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._stopping)
            left: deque[Item] = deque()
            for item in self._waiting:
                if batch := self._batch_with_room(item):
                    batch.items.append(item)
                else:
                    left.append(item)
            self._waiting = left
            self._report_queue()
        self._report_running()
        return bool(self._running)

    def _batch_with_room(self, item: Item) -> Batch | None:
        """The batch that the item can be sampled in, perhaps a new one; None if it must wait."""
        key = item.key
        batch = self._running.get(key)
        if batch is None and (key.joins or all(other.joins for other in self._running)):
            items: list[Item] = []
            batch = self._running[key] = Batch(items, self._calls(item, items))
        is_open = batch is not None and (key.joins or not batch.has_begun) and len(batch.items) < self.batch
        return batch if is_open else None

    def _calls(self, first: Item, items: list[Item]) -> Iterator[None]:
        if isinstance(first.job, Task):
            return _run_task(first.job)
        return self._sample_joined(items) if first.key.joins else self._sample_together(items)

    def _advance(self, key: BatchKey, batch: Batch) -> None:
        """One network call. An error ends the batch, not the thread."""
        started, num_rows, batch.has_begun = time.monotonic(), len(batch.items), True
        try:
            has_ended = next(batch.calls, self) is self
        except Exception as error:  # the log has the traceback
            message = str(error) if isinstance(error, UserError) else "sampling failed"
            fields = {"model": self.name, "message": str(error)}  # of ids, not of text
            log.error("batch failed", extra={"fields": fields}, exc_info=error)
            for item in batch.items:
                item.job.refuse(item.row, message)
            has_ended = True
        if has_ended:
            batch.items.clear()
            del self._running[key]
        seconds = time.monotonic() - started
        self._busy_seconds += seconds
        self._num_finished += num_rows - len(batch.items)
        if not has_ended:
            self._monitor.call_done(self.name, num_rows, seconds)
        self._report_running()

    def _report_running(self) -> None:
        self._monitor.running_changed(self.name, sum(len(batch.items) for batch in self._running.values()))

    def frames(self, rows: Sequence[CanvasRow]) -> Iterator[Frame]:
        """The sampling run of rows that begin together, at most `batch`; only for the worker's thread."""
        length = rows[0].padded_length(self.lm)
        if self.lm.method.causal:  # a KV cache has a fixed number of rows
            rows = [*rows, *[rows[0]] * (self.batch - len(rows))]
        return self.lm.run_sampler(
            padded_canvas(rows, length, self.lm.fill_id),
            rows[0].sampling,
            rng_rows=[row.number for row in rows],
            rng_seeds=[row.seed for row in rows],
        )

    def _sample_together(self, items: list[Item]) -> Iterator[None]:
        """Rows with equal keys, from the first step to the last."""
        items[:] = [item for item in items if not item.job.cancelled.is_set()]
        if not items:
            return
        for frame in self.frames([item.canvas_row for item in items]):
            if all(item.job.cancelled.is_set() for item in items):
                return
            all_ids = frame.ids.cpu()
            for item, ids in zip(items, all_ids, strict=False):  # the frames of causal models have padding rows
                self._report_prefix(item, ids)
            yield
        for item, ids, chance in zip(items, all_ids, frame.chance.cpu(), strict=False):
            _complete(item, ids, chance)

    def _sample_joined(self, items: list[Item]) -> Iterator[None]:
        """Rows of one padded length. Between two calls `items` may grow; complete and cancelled rows are removed."""
        rows, joined = JoinedRows(self.batch, self._joinable_run(items[0])), dict[Item, JoinedRow]()

        def remove(item: Item) -> None:
            items.remove(item)
            if item in joined:
                rows.leave(joined.pop(item))

        while items:
            for item in [each for each in items if each.job.cancelled.is_set()]:
                remove(item)
            joined |= {item: rows.join(self._joinable_run(item)) for item in items if item not in joined}
            if joined:
                rows.step()
            ids, chance = rows.on_cpu()
            for item, row in list(joined.items()):
                if row.calls:
                    self._report_prefix(item, ids[row.slot])
                else:
                    _complete(item, ids[row.slot], chance[row.slot])
                    remove(item)
            yield

    def _joinable_run(self, item: Item) -> SamplingRun:
        return cast(PositionsFirst, item.canvas_row.frames(self.lm)).run

    def _report_prefix(self, item: Item, ids: Tensor) -> None:
        """Report the tokens before the first mask of a streamed row, if there are more than before."""
        job = cast(Job, item.job)
        if not job.streams or job.cancelled.is_set():
            return
        text = ids[: len(item.canvas_row.ids)]
        num_known = int((text != self.lm.mask_id).long().cumprod(dim=0).sum())
        if num_known > item.num_reported:
            item.num_reported = num_known
            job.notify(RowUpdate(item.row, text[:num_known].tolist()))


def _run_task(task: Task) -> Iterator[None]:
    for result in task.work():
        if task.cancelled.is_set():
            return
        task.notify(result)
        yield


def _complete(item: Item, ids: Tensor, chance: Tensor) -> None:
    """Report the last state of a row."""
    end = len(item.canvas_row.ids)
    if chance.isfinite().all():
        cast(Job, item.job).notify(RowUpdate(item.row, ids[:end].tolist(), chance[:end].tolist()))
    else:
        item.job.refuse(item.row, NOT_FINITE)
