"""Rows as batches, for ever: shuffled anew each epoch, shared among processes, from any position. Knows no networks.

A position is two integers and says where the next global batch begins. A global batch is the same whatever the number
of processes; process r of n takes its r-th n-th. A batch that reaches the end of an epoch goes on with the next one, so
every batch is full and no row is left out.

Shapes: B rows of this process, L ids each. `pad` is True at padding.
"""

import atexit
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.rows.packing import Rows
from adlm.data.rows.shuffle import shuffle, uniform
from adlm.errors import UserError


class Position(NamedTuple):
    """Where a loader stands."""

    epoch: int = 0
    row: int = 0
    """Rows of the epoch that have been given out; of a stream, see `streaming`."""


START = Position()


class Batch(NamedTuple):
    x: Tensor
    """(B, L), ids."""
    pad: Tensor | None
    """(B, L), or None where no row of this batch has padding.

    So rows packed without overlap give it with the one batch that holds the short last row, and with no other.
    """
    after: Position
    """Where the next batch begins."""


class Batches(Protocol):
    """What training reads from: prepared rows and streams alike."""

    def batches(self, start: Position = START) -> Iterator[Batch]:
        """From there on, without end."""
        ...


@dataclass(frozen=True)
class Loader:
    """Batches of prepared rows."""

    rows: Rows
    batch_size: int
    """Rows of a global batch, over all processes."""
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.num_ranks)

    def batches(self, start: Position = START) -> Iterator[Batch]:
        return prefetch(self._batches(start))

    def _batches(self, start: Position) -> Iterator[Batch]:
        """One after the other, each when it is asked for."""
        position, share = start, self.batch_size // self.num_ranks
        while True:
            first = Position(*divmod(position.row + self.rank * share, len(self.rows)))
            numbers, draws = self._order(Position(position.epoch + first.epoch, first.row), share)
            x, pad = self.rows.read(numbers, draws)
            epochs, row = divmod(position.row + self.batch_size, len(self.rows))
            position = Position(position.epoch + epochs, row)
            yield Batch(torch.from_numpy(x), None if pad is None else torch.from_numpy(pad), position)

    def _order(self, start: Position, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The numbers of the next `count` rows, and a draw for each."""
        numbers, draws = [], []
        epoch, row = start
        while count:
            some = np.arange(row, min(row + count, len(self.rows)))
            numbers.append(shuffle(some, len(self.rows), self.seed, epoch) if self.shuffle else some)
            draws.append(uniform(some, self.seed, epoch))
            epoch, row, count = epoch + 1, 0, count - len(some)
        return np.concatenate(numbers), np.concatenate(draws)


def check_ranks(batch_size: int, rank: int, num_ranks: int) -> None:
    assert 0 <= rank < num_ranks
    if batch_size % num_ranks:
        nearest = max(1, round(batch_size / num_ranks)) * num_ranks
        raise UserError(
            f"train.batch_size {batch_size} is not a multiple of {num_ranks} processes; try train.batch_size={nearest}"
        )


def prefetch(batches: Iterator[Batch], depth: int = 4) -> Iterator[Batch]:
    """The same batches, up to `depth` of them made ahead by a thread, so that who takes them need not wait.

    The thread ends with the iterator, or at the latest before Python does: one that is still inside torch when the
    interpreter goes would abort the process.
    """
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stopped = threading.Event()

    def fill() -> None:
        try:
            for batch in batches:
                if not _put(ready, batch, stopped):
                    return
        except BaseException as error:  # noqa: BLE001  (raised again where the batch is taken)
            _put(ready, error, stopped)

    thread = threading.Thread(target=fill, daemon=True, name="loader")

    def stop() -> None:
        stopped.set()
        thread.join()

    atexit.register(stop)
    thread.start()
    try:
        while True:
            batch = ready.get()
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        atexit.unregister(stop)
        stop()


def _put(ready: "queue.Queue[Batch | BaseException]", item: Batch | BaseException, stopped: threading.Event) -> bool:
    """Wait for room, unless nobody takes any more."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
