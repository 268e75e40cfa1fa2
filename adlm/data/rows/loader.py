"""An endless iterator of batches: shuffled every epoch, split among ranks, resumable. Independent of networks.

A Position (epoch, row) is where the next global batch begins. Global batches do not depend on the number of ranks; rank
r of n takes the r-th of n equal slices. A batch at the end of an epoch is filled from the next one, so every batch is
full and no row is skipped.

Shapes: B rows of this rank, L ids each. `pad` is True at padding.
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
    """The position of a loader, saved in checkpoints."""

    epoch: int = 0
    row: int = 0
    """Number of rows of the epoch before the position; see `streaming` for the meaning in a stream."""


START = Position()


class Batch(NamedTuple):
    x: Tensor
    """(B, L), ids."""
    pad: Tensor | None
    """(B, L), or None if no row of this batch has padding.

    With rows packed without overlap, only the batch with the short last row has it.
    """
    after: Position
    """Position of the next batch."""


class Batches(Protocol):
    """A source of training batches: prepared rows or a stream."""

    def batches(self, start: Position = START) -> Iterator[Batch]:
        """An endless iterator of the batches from `start` on."""
        ...


@dataclass(frozen=True)
class Loader:
    """Batches of prepared rows."""

    rows: Rows
    batch_size: int
    """Rows of a global batch, over all ranks."""
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.num_ranks)

    def batches(self, start: Position = START) -> Iterator[Batch]:
        return prefetch(self._batches(start))

    def _batches(self, start: Position) -> Iterator[Batch]:
        """The batches, each computed when it is requested."""
        position, share = start, self.batch_size // self.num_ranks
        while True:
            first = Position(*divmod(position.row + self.rank * share, len(self.rows)))
            numbers, draws = self._order(Position(position.epoch + first.epoch, first.row), share)
            x, pad = self.rows.read(numbers, draws)
            epochs, row = divmod(position.row + self.batch_size, len(self.rows))
            position = Position(position.epoch + epochs, row)
            yield Batch(torch.from_numpy(x), None if pad is None else torch.from_numpy(pad), position)

    def _order(self, start: Position, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The numbers of the next `count` rows, and a uniform random number for each."""
        numbers, draws = [], []
        epoch, row = start
        while count:
            positions = np.arange(row, min(row + count, len(self.rows)))
            numbers.append(shuffle(positions, len(self.rows), self.seed, epoch) if self.shuffle else positions)
            draws.append(uniform(positions, self.seed, epoch))
            epoch, row, count = epoch + 1, 0, count - len(positions)
        return np.concatenate(numbers), np.concatenate(draws)


def check_ranks(batch_size: int, rank: int, num_ranks: int) -> None:
    assert 0 <= rank < num_ranks
    if batch_size % num_ranks:
        nearest = max(1, round(batch_size / num_ranks)) * num_ranks
        raise UserError(
            f"train.batch_size {batch_size} is not a multiple of {num_ranks} processes; try train.batch_size={nearest}"
        )


def prefetch(batches: Iterator[Batch], depth: int = 4) -> Iterator[Batch]:
    """The same batches, with up to `depth` of them computed ahead in a background thread.

    The thread ends with the iterator, or at interpreter exit: a thread that is still inside torch while the interpreter
    shuts down would abort the process.
    """
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stopped = threading.Event()

    def fill() -> None:
        try:
            for batch in batches:
                if not _put(ready, batch, stopped):
                    return
        except BaseException as error:  # noqa: BLE001  (raised again in the consumer)
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
    """Put an item in the queue when there is room; False if the consumer has stopped."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
