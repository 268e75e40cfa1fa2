"""An endless iterator of batches: shuffled every epoch, split among ranks, resumable. Independent of networks.

A Position (epoch, row) is where the next global batch begins. Global batches do not depend on the number of ranks; rank
r of n takes the r-th of n equal slices. A batch at the end of an epoch is filled from the next one, so every batch is
full and no row is skipped.

A Stream tokenises during training, for text that is too large to store twice. Its order is that of the source, without
shuffling. Its Position is the number of documents that end before the next row, over all epochs, and the number of ids
of the next document that are already used; to resume, the documents before it are read but not tokenised. Every rank
tokenises every document, because the start of a row depends on all documents before it.

Shapes: B rows of this rank, L ids each. `pad` is True at padding.
"""

import atexit
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.rows.holes import Rearrangement
from adlm.data.rows.packing import Rows, text_width
from adlm.data.sources.source import Source
from adlm.errors import UserError
from adlm.tokens import Tokenizer

ROUNDS = 6  # of the Feistel network that shuffles
NUM_ENCODED = 64  # documents of a stream encoded at once
NUM_AHEAD = 4  # batches computed ahead
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fractional part times 2^64
Numbers = NDArray[np.uint64]


class Position(NamedTuple):
    """The position of a loader, saved in checkpoints."""

    epoch: int = 0
    row: int = 0
    """Number of rows of the epoch before the position; in a stream, see above."""


START = Position()


class TrainingBatch(NamedTuple):
    x: Tensor
    """(B, L), ids."""
    pad: Tensor | None
    """(B, L), or None if no row of this batch has padding.

    With rows packed without overlap, only the batch with the short last row has it.
    """
    after: Position
    """Position of the next batch."""
    resets_optimizer: bool = False
    """Whether the optimizer starts anew before this batch: at the first batch of some stages of reasoning."""
    given: Tensor | None = None
    """(B, L), True at ids without a loss, such as prompts and copies in rearranged rows; None for running text."""
    labels: Tensor | None = None
    """(B, L), True at labelled ids; None if they are not read."""


class Batches:
    """A source of training batches: prepared rows or a stream."""

    def batches(self, start: Position = START) -> Iterator[TrainingBatch]:
        """An endless iterator of the batches from `start` on."""
        return prefetch(self._batches(start))

    def _batches(self, start: Position) -> Iterator[TrainingBatch]:
        """The batches, each computed when it is requested."""
        raise NotImplementedError


@dataclass(frozen=True)
class Loader(Batches):
    """Batches of prepared rows."""

    rows: Rows
    batch_size: int
    """Rows of a global batch, over all ranks."""
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    shuffle: bool = True
    rearrangement: Rearrangement | None = None
    """Applied to the rows of a batch, which are running text; not to one with padding."""
    random_length: float = 0.0
    """Share of the rows that are cut to a random length: 1, ..., n of the n tokens of their text, equally likely."""
    reads_labels: bool = False
    """Whether batches have labels, for rows that are not rearranged."""

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.num_ranks)

    def _batches(self, start: Position) -> Iterator[TrainingBatch]:
        first, share = start.epoch * len(self.rows) + start.row, self.batch_size // self.num_ranks
        while True:
            rows = self.read(first + self.rank * share + np.arange(share))
            first += self.batch_size
            yield rows.batch(Position(*divmod(first, len(self.rows))))

    def read(self, numbers: NDArray[np.int64]) -> "ReadRows":
        """The rows of these numbers, counted from the first epoch on, as they are trained on."""
        index, draws, cuts = np.empty(len(numbers), np.int64), np.empty(len(numbers)), np.empty(len(numbers))
        epochs, positions = np.divmod(numbers, len(self.rows))
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            index[here] = positions[here]
            if self.shuffle:
                index[here] = shuffle(positions[here], len(self.rows), self.seed, epoch)
            draws[here] = uniform(positions[here], self.seed, epoch)
            cuts[here] = uniform(positions[here], self.seed + 1, epoch)
        kept = kept_shares(cuts, self.random_length) if self.random_length else None
        x, pad = self.rows.read(index, draws, kept)
        given = self.rows.given(index)
        labels = self.rows.labels(index, draws, kept) if self.reads_labels else None
        if self.rearrangement is not None and pad is None:
            x, given = self.rearrangement(x, draws)
        return ReadRows(x, pad, given, labels)


class ReadRows(NamedTuple):
    """Rows of a batch, as NumPy arrays (n, L); None where no row has any of the kind. See `TrainingBatch`."""

    x: NDArray[np.int64]
    pad: NDArray[np.bool_] | None
    given: NDArray[np.bool_] | None
    labels: NDArray[np.bool_] | None

    def batch(self, after: Position) -> TrainingBatch:
        pad, given, labels = (None if each is None else torch.from_numpy(each) for each in self[1:])
        return TrainingBatch(torch.from_numpy(self.x), pad, after, given=given, labels=labels)


@dataclass(frozen=True)
class Mixture(Batches):
    """Batches of several texts, each with its share of the rows of every batch.

    Of B rows, a text with share w has w B, rounded up or down; over n batches it has w B n, up to a few rows. Each text
    has epochs of its own, so a small one with a large share is repeated. The position is the number of rows so far.
    """

    loaders: tuple[Loader, ...]
    """Of the texts, with the batch size and the rank of the mixture."""
    weights: tuple[float, ...]
    """Of the texts; their shares are these over their sum."""
    seed: int = 0
    """Of the order of the rows in a batch."""

    def _batches(self, start: Position) -> Iterator[TrainingBatch]:
        loader = self.loaders[0]
        size, share = loader.batch_size, loader.batch_size // loader.num_ranks
        number = start.row // size
        before = self.counts(np.arange(number)).sum(axis=0)  # rows of each text before this batch
        while True:
            counts = self.counts(np.array([number]))[0]
            first = np.cumsum(counts) - counts  # of each text in the batch, before its rows are shuffled
            places = shuffle(loader.rank * share + np.arange(share), size, self.seed, number)
            texts = np.searchsorted(first + counts, places, side="right")
            numbers = (before - first)[texts] + places
            number, before = number + 1, before + counts
            parts = [(texts == index, each) for index, each in enumerate(self.loaders) if counts[index]]
            rows = join_rows([(here, each.read(numbers[here])) for here, each in parts if here.any()])
            yield rows.batch(Position(0, number * size))

    def counts(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, texts), how many rows of each text are in the batches of these numbers.

        Systematic sampling: with F the shares summed up times B, text i has floor(F_i + u) - floor(F_(i-1) + u) rows,
        u being the fractional part of the batch's number times the golden ratio, which fills [0, 1) evenly.
        """
        shares = np.cumsum(self.weights) / sum(self.weights)
        ends = np.append(shares[:-1], 1.0) * self.loaders[0].batch_size  # exactly B at the end
        shifts = (batches.astype(np.uint64) * GOLDEN_RATIO >> np.uint64(11)).astype(np.float64) * 2.0**-53
        rounded: NDArray[np.int64] = np.floor(ends + shifts[:, None]).astype(np.int64)
        rounded[:, 1:] -= rounded[:, :-1].copy()
        return rounded


def join_rows(parts: Sequence[tuple[NDArray[np.bool_], ReadRows]]) -> ReadRows:
    """Rows of several texts as one batch: those of each part are where its (n,) booleans are True."""
    found: list[Any] = []
    for field in zip(*(rows for _, rows in parts), strict=True):
        known = [(here, part) for (here, _), part in zip(parts, field, strict=True) if part is not None]
        if not known:
            found.append(None)
            continue
        found.append(np.zeros((len(parts[0][0]), known[0][1].shape[1]), known[0][1].dtype))
        for here, part in known:
            found[-1][here] = part
    return ReadRows(*found)


@dataclass(frozen=True)
class Stream(Batches):
    """Batches of the documents of one split of a source."""

    source: Source
    tokenizer: Tokenizer
    length: int
    batch_size: int
    split: str = "train"
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.num_ranks)
        text_width(self.tokenizer.vocabulary, self.length)
        if self.source.packing not in ("packed", "padded"):
            raise UserError(f"data.packing {self.source.packing} needs prepared shards; stream by packed or padded")

    def _batches(self, start: Position) -> Iterator[TrainingBatch]:
        rows = self._padded(start) if self.source.packing == "padded" else self._packed(start)
        share = self.batch_size // self.num_ranks
        vocabulary = self.tokenizer.vocabulary
        bos, eos = vocabulary.row_boundaries
        x = np.full((share, self.length), vocabulary.padding_id, np.int64)
        used = np.zeros(share, np.int64)
        while True:
            x[:] = vocabulary.padding_id
            for number in range(self.batch_size):
                ids, after = next(rows)
                index = number - self.rank * share
                if 0 <= index < share:
                    row = [*bos, *ids, *eos]
                    x[index, : len(row)], used[index] = row, len(row)
            pad = np.arange(self.length) >= used[:, None] if self.source.packing == "padded" else None
            yield TrainingBatch(torch.tensor(x), None if pad is None else torch.from_numpy(pad), after)

    def _packed(self, start: Position) -> Iterator[tuple[list[int], Position]]:
        """Full rows of concatenated documents, and the position after each."""
        width = text_width(self.tokenizer.vocabulary, self.length)
        row: list[int] = []
        skipped = start.row
        for document, ids in self._documents(start.epoch):
            ids = ids[skipped:]
            used, skipped = skipped, 0
            while len(row) + len(ids) >= width:
                room = width - len(row)
                used += room
                yield row + ids[:room], Position(document, used)
                row, ids = [], ids[room:]
            row += ids

    def _padded(self, start: Position) -> Iterator[tuple[list[int], Position]]:
        """One document per row, truncated to the row, and the position after each."""
        width = text_width(self.tokenizer.vocabulary, self.length)
        marks = 0 if self.tokenizer.vocabulary.eos_id is None else 1
        for document, ids in self._documents(start.epoch):
            yield ids[: min(width, len(ids) - marks)], Position(document + 1, 0)

    def _documents(self, first: int) -> Iterator[tuple[int, list[int]]]:
        """The numbers and ids of the split's documents from number `first` on, epoch after epoch."""
        eos = [] if self.tokenizer.vocabulary.eos_id is None else [self.tokenizer.vocabulary.eos_id]
        pending: list[tuple[int, list[str]]] = []
        for number, chunks in self._read_documents():
            if number < first:
                continue
            pending.append((number, chunks))
            if len(pending) == NUM_ENCODED:
                rows = iter(self.tokenizer.encode_batch([chunk for _, each in pending for chunk in each]))
                for document, each in pending:
                    yield document, [*chain.from_iterable(islice(rows, len(each))), *eos]
                pending = []

    def _read_documents(self) -> Iterator[tuple[int, list[str]]]:
        """The documents of the split as lists of chunks, numbered over all epochs, without end."""
        number = 0
        while True:
            before, document = number, 0
            for part in self.source.parts:
                chunks: list[str] = []
                for text, ends in part.chunks():
                    chunks.append(text)
                    if not ends:
                        continue
                    if self.source.split_of(part, document) == self.split:
                        yield number, chunks
                        number += 1
                    document, chunks = document + 1, []
            if number == before:
                raise UserError(f"{self.source.title} has no document in its split {self.split!r}")


def shuffle(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The rows at these positions of the epoch: a pseudorandom permutation of 0 ... size - 1 that is not stored.

    A Feistel network of six rounds permutes the numbers below a power of four; a result outside 0 ... size - 1 is
    permuted again until it is inside (cycle walking) [Black and Rogaway, 2002].
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _mixed(np.arange(ROUNDS, dtype=np.uint64) + _mixed(_key(seed) ^ _mixed(_key(epoch) + np.uint64(1))))
    numbers = _network(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(numbers >= size)
    while len(outside):
        numbers[outside] = _network(numbers[outside], half, keys)
        outside = outside[numbers[outside] >= size]
    return numbers.astype(np.int64)


def uniform(positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.float64]:
    """A pseudorandom number from [0, 1) for each position of the epoch."""
    mixed = _mixed(positions.astype(np.uint64) + _mixed(_key(seed) + _mixed(~_key(epoch))))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def kept_shares(draws: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """How much of each row is kept: for a `share` of the draws from [0, 1) uniform in (0, 1], for the others 1."""
    return np.where(draws < share, 1 - draws / share, 1.0)


def _key(number: int) -> Numbers:
    return np.array([number % 2**64], dtype=np.uint64)


def _network(numbers: Numbers, half: np.uint64, keys: Numbers) -> Numbers:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & low)
    return (left << half) | right


def _mixed(numbers: Numbers) -> Numbers:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the number."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def check_ranks(batch_size: int, rank: int, num_ranks: int) -> None:
    assert 0 <= rank < num_ranks
    if batch_size % num_ranks:
        nearest = max(1, round(batch_size / num_ranks)) * num_ranks
        raise UserError(
            f"train.batch_size {batch_size} is not a multiple of {num_ranks} processes; try train.batch_size={nearest}"
        )


def prefetch(batches: Iterator[TrainingBatch]) -> Iterator[TrainingBatch]:
    """The same batches, with up to NUM_AHEAD of them computed ahead in a background thread.

    The thread ends with the iterator, or at interpreter exit: a thread that is still inside torch while the interpreter
    shuts down would abort the process.
    """
    ready: queue.Queue[TrainingBatch | BaseException] = queue.Queue(NUM_AHEAD)
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
    unregister = atexit.unregister  # local: at interpreter exit the module may be cleared first
    thread.start()
    try:
        while True:
            batch = ready.get()
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        unregister(stop)
        stop()


def _put(
    ready: "queue.Queue[TrainingBatch | BaseException]", item: TrainingBatch | BaseException, stopped: threading.Event
) -> bool:
    """Put an item in the queue when there is room; False if the consumer has stopped."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
