"""Rows of concurrent requests in shared network calls, made by one thread per model. Independent of HTTP and of text.

Rows of equal padded length share calls, whatever their sampling options, and each call is for the rows whose turn it is
(`sampling/events.py`). Rows of models with a KV cache, and of samplers that choose positions by the network's output,
begin together and stay together. The network always reads `batch` rows, so that a row's tokens depend on its canvas,
seed and row number, not on the other rows (`LanguageModel.with_fixed_batch`).

Every call is a turn. Clients have equal shares of the time. Of one client's requests, those that have used little time
go first, the others after them in classes of 0.5, 1, 2, ... seconds, and in a class the oldest: short requests are
finished in the order they came, and do not wait for the end of long ones. Every fourth call is for the oldest, so that
long ones are finished too.

Shapes: B rows, L tokens.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from adlm.canvas import Canvas
from adlm.errors import UserError
from adlm.language_model import LanguageModel, Run
from adlm.sampling.events import JoinedRow, JoinedRows, PositionsFirst
from adlm.sampling.frame import NOT_FINITE, Frame, SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sampler_of

LONGEST_RETRY = 60  # seconds
SHORT_SECONDS = 0.5
"""Time of network calls up to which requests are served in the order they came."""
OLDEST_EVERY = 4
"""One of so many calls is for the oldest request of a client, however much it has used."""
MAX_TOGETHER = 4
"""Batches that rows cannot join, at a time. Each has its state, such as a KV cache, and more would be less full."""
SHUTTING_DOWN = "the server is shutting down"
log = logging.getLogger("adlm.apps.server")
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
        """A KV cache is filled with the prompt in one call, whose shape would depend on prompts of other lengths.

        Where a row of such a batch is constrained, nothing is drafted, which changes what the others draw.
        """
        if isinstance(self.rows[0].generate(), PositionsFirst):
            return [BatchKey(True, padded_length(row)) for row in self.rows]
        given = [_masks_of(row) if lm.method.cached else () for row in self.rows]
        lengths = [padded_length(row) for row in self.rows]
        sampling, constrained = self.rows[0].sampling, [lm.method.cached and bool(row.holes) for row in self.rows]
        return [BatchKey(False, (sampling, *shape)) for shape in zip(lengths, given, constrained, strict=True)]

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


def _masks_of(row: Run) -> tuple[Hashable, ...]:
    """Where the masks of a row begin; all of them where text comes after a mask: such rows are rearranged.

    What comes after a hole of unknown length can begin anywhere then, so a row with another hole equals no other row.
    """
    lm, ids = row.lm, row.canvas.ids[0].tolist()
    masks = [position for position, index in enumerate(ids) if index in (lm.mask_id, lm.open_id)]
    if len(ids) - masks[0] == len(masks):
        return (masks[0],)
    unknown = [position for position in masks if ids[position] == lm.open_id]
    is_last = not unknown or unknown == list(range(unknown[0], masks[-1] + 1))
    return (len(ids), tuple(masks), tuple(unknown), None if is_last else object())


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
    holes = tuple(replace(hole, row=number) for number, row in enumerate(rows) for hole in row.holes)
    return Run(lm, Canvas(ids, pad), rows[0].sampling, rng, holes=holes)


@dataclass(eq=False)
class SharedBatch:
    """Items that share network calls."""

    key: BatchKey
    items: list[Item] = field(default_factory=list)
    """Those that have begun and are not complete."""
    turn: list[Item] = field(default_factory=list)
    """Those that the next call is for."""
    calls: Iterator[None] = field(init=False)
    """Each `next` makes one network call; the end is the end of the batch."""


class QueueFull(Exception):
    """Too many rows are not complete; `retry_after` is an estimate in seconds."""

    def __init__(self, num_rows: int, retry_after: int):
        super().__init__(f"{num_rows} completions are waiting or running already; try again in {retry_after} s")
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

    There can be several batches: one of joining rows for each padded length, and up to MAX_TOGETHER that rows cannot
    join, at most one of them for each request and for each key: rows that wait for it fill the next one.
    """

    def __init__(self, name: str, lm: LanguageModel, batch: int, max_waiting: int, monitor: Monitor):
        self.name, self.lm, self.batch, self.max_waiting = name, lm.with_fixed_batch(batch), batch, max_waiting
        self._monitor = monitor
        self._waiting: list[Item] = []
        self._running: list[SharedBatch] = []  # changed by the thread only
        self._used: dict[str, float] = {}  # seconds of network calls by client
        self._num_calls = 0
        self._changed = threading.Condition()
        self._stopping = self._aborting = False
        self._busy_seconds, self._num_finished, self._row_seconds = 0.0, 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"adlm-{name}", daemon=True)

    def start(self) -> None:
        _ = self.lm.frozen  # built once, before requests in other threads are checked
        self._thread.start()

    def submit(self, job: Job | Task) -> None:
        """Append the rows of a job, or a task, to the queue."""
        items = [Item(job, row, key) for row, key in enumerate(job.keys(self.lm))]
        with self._changed:
            if self._stopping:
                raise ShuttingDown(SHUTTING_DOWN)
            num_rows = len(self._waiting) + self._num_running()
            if num_rows + len(items) > self.max_waiting + self.batch:
                estimate = round(num_rows * self._busy_seconds / max(1, self._num_finished))
                raise QueueFull(num_rows, min(max(1, estimate), LONGEST_RETRY))
            self._waiting += items
            self._report_rows()
            self._changed.notify()

    def cancel(self, job: Job | Task) -> None:
        """Drop the rows of a job: at once if they have not begun, else after the network call that is being made.

        Rows that began together with others end with them.
        """
        job.cancelled.set()
        with self._changed:
            self._waiting = [item for item in self._waiting if item.job is not job]
            self._report_rows()

    def stop(self, at_once: bool = False) -> None:
        """Refuse waiting rows. Rows that have begun are finished, or refused `at_once` after the current call."""
        with self._changed:
            self._stopping, self._aborting = True, self._aborting or at_once
            refused, self._waiting = self._waiting, []
            self._report_rows()
            self._changed.notify()
        for item in refused:
            item.job.refuse(item.row, SHUTTING_DOWN)

    def join(self) -> None:
        self._thread.join()

    def _num_running(self) -> int:
        return sum(len(batch.items) for batch in self._running)

    def _report_rows(self) -> None:
        self._monitor.queue_changed(self.name, len(self._waiting))
        self._monitor.running_changed(self.name, self._num_running())

    def _run(self) -> None:
        while batch := self._next_turn():
            self._advance(batch)

    def _next_turn(self) -> SharedBatch | None:
        """The batch of the next network call. Waits for work; None at the end."""
        with self._changed:
            while not (items := self._items()) and not self._stopping:
                self._report_rows()
                self._changed.wait()
            if items:
                first = min(items, key=lambda item: (self._used[item.job.client], self._priority(item)))
                key, batch = first.key, self._batch_of(first)
                if key.joins or not batch.items:
                    own = batch.items if key.joins else []
                    batch.turn = self._share([*own, *(item for item in self._waiting if item.key == key)])
                    batch.items += [item for item in batch.turn if item not in own]
                    self._waiting = [item for item in self._waiting if item not in batch.turn]
            self._report_rows()
            return batch if items else None

    def _items(self) -> list[Item]:
        """What may have the next turn. Batches are rid of cancelled rows here, and dropped if they have no others."""
        for batch in self._running:
            if self._aborting:
                for item in batch.items:
                    item.job.refuse(item.row, SHUTTING_DOWN)
            batch.items = [item for item in batch.items if not (self._aborting or item.job.cancelled.is_set())]
            batch.turn = [item for item in batch.turn if item in batch.items]
        self._running = [batch for batch in self._running if batch.items]
        begun = [item for batch in self._running for item in batch.items]
        clients = {item.job.client for item in (*begun, *self._waiting)}
        least = min((self._used[client] for client in clients if client in self._used), default=0.0)
        self._used = {client: self._used.get(client, least) for client in clients}
        together = [batch for batch in self._running if not batch.key.joins]
        busy = {batch.key for batch in together} | {item.job for batch in together for item in batch.items}
        has_room = len(together) < MAX_TOGETHER
        return begun + [
            item
            for item in self._waiting
            if item.key.joins or (has_room and item.key not in busy and item.job not in busy)
        ]

    def _batch_of(self, item: Item) -> SharedBatch:
        """The batch that the item is in or can join, perhaps a new one."""
        for batch in self._running:
            if item in batch.items or (item.key.joins and item.key == batch.key):
                return batch
        batch = SharedBatch(item.key)
        if isinstance(item.job, Task):
            batch.calls = map(item.job.notify, item.job.work())
        else:
            batch.calls = self._sample_joined(batch) if item.key.joins else self._sample_together(batch)
        self._running.append(batch)
        return batch

    def _priority(self, item: Item) -> tuple[int, float]:
        """The place of an item among those of its client: the least is first."""
        is_turn_of_oldest = self._num_calls % OLDEST_EVERY == OLDEST_EVERY - 1
        return 0 if is_turn_of_oldest else int(item.job.used / SHORT_SECONDS).bit_length(), item.arrival

    def _share(self, items: list[Item]) -> list[Item]:
        """The items for one call, one after the other from the client that will have used the least time then."""
        left, used = sorted(items, key=self._priority), dict(self._used)
        turn: list[Item] = []
        while left and len(turn) < self.batch:
            turn.append(min(left, key=lambda item: used[item.job.client]))
            left.remove(turn[-1])
            used[turn[-1].job.client] += self._row_seconds
        return turn

    def _advance(self, batch: SharedBatch) -> None:
        """One network call. An error ends the batch, not the thread."""
        started, turn, num_rows = time.monotonic(), batch.turn, len(batch.items)
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
        seconds = time.monotonic() - started
        self._busy_seconds += seconds
        self._num_finished += num_rows - len(batch.items)
        self._row_seconds = seconds / len(turn)
        self._num_calls += 1
        for item in turn:
            item.job.used += self._row_seconds
            self._used[item.job.client] += self._row_seconds
        if not has_ended:
            self._monitor.call_done(self.name, len(turn), seconds)

    def frames(self, rows: Sequence[Run]) -> Iterator[Frame]:
        """The frames of rows that begin together, at most `batch`; only for the worker's thread."""
        if self.lm.method.cached:  # a KV cache has a fixed number of rows
            rows = [*rows, *[rows[0]] * (self.batch - len(rows))]
        return together(rows).frames()

    def _sample_together(self, batch: SharedBatch) -> Iterator[None]:
        """Rows with equal keys, from the first step to the last."""
        items = list(batch.items)
        for frame in self.frames([item.run for item in items]):
            all_ids = frame.ids.cpu()
            for item, ids in zip(items, all_ids, strict=False):  # with a KV cache, the last rows are padding
                self._report_prefix(item, ids)
            yield
        for item, ids, chance in zip(items, all_ids, frame.chance.cpu(), strict=False):
            _complete(item, ids, chance)

    def _sample_joined(self, batch: SharedBatch) -> Iterator[None]:
        """Rows of one padded length, in each call those whose turn it is."""
        rows, joined = JoinedRows(self._joinable_run(batch.turn[0])), dict[Item, JoinedRow]()
        while True:
            for item in [each for each in joined if each.job.cancelled.is_set()]:
                rows.leave(joined.pop(item))
            joined |= {item: rows.join(self._joinable_run(item)) for item in batch.turn if item not in joined}
            all_ids, all_chance = rows.step([joined[item] for item in batch.turn])
            for item, ids, chance in zip(batch.turn, all_ids, all_chance, strict=True):
                if joined[item].num_calls:
                    self._report_prefix(item, ids)
                else:
                    _complete(item, ids, chance)
                    batch.items.remove(item)
                    rows.leave(joined.pop(item))
            yield

    def _joinable_run(self, item: Item) -> SamplingRun:
        return cast(PositionsFirst, together([item.run]).generate()).run

    def _report_prefix(self, item: Item, ids: Tensor) -> None:
        """Report the tokens before the first mask of a streamed row, if there are more than before."""
        job = cast(Job, item.job)
        if not job.streams or job.cancelled.is_set():
            return
        text = ids[: item.num_tokens]
        num_known = int((text != self.lm.mask_id).long().cumprod(dim=0).sum())
        block_length = self.lm.config.model.block_length
        if block_length and sampler_of(item.run.sampling).remasks:
            if len(_masks_of(item.run)) > 1:
                return  # the blocks are those of a rearranged row
            num_known = 1 + (num_known - 2) // block_length * block_length  # the last block with text may be open
        if num_known > item.num_reported:
            item.num_reported = num_known
            job.notify(RowUpdate(item.row, text[:num_known].tolist()))


def _complete(item: Item, ids: Tensor, chance: Tensor) -> None:
    """Report the last state of a row."""
    end = item.num_tokens
    if chance.isfinite().all():
        cast(Job, item.job).notify(RowUpdate(item.row, ids[:end].tolist(), chance[:end].tolist()))
    else:
        item.job.refuse(item.row, NOT_FINITE)
