"""Batches straight from a source, tokenised on the way, in the order of its documents. Writes nothing.

For text that is too large to keep twice, or that never ends. Nothing is shuffled but by the source itself. A position
is the number of documents that lie wholly before the next row, over all epochs, and how many ids of the next document
were used; it is found again by reading, not by tokenising, what lies before it. Every process tokenises every document,
because where a row begins depends on all that is before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch

from adlm.data.rows.loader import START, Batch, Position, check_ranks, prefetch
from adlm.data.rows.packing import padding_id, row_frame, text_width
from adlm.data.sources.source import Source
from adlm.errors import UserError
from adlm.tokens import Tokenizer

AHEAD = 64  # documents encoded at once


@dataclass(frozen=True)
class Stream:
    """Batches of the documents of one split of a plan."""

    plan: Source
    tokenizer: Tokenizer
    length: int
    batch_size: int
    split: str = "train"
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.num_ranks)
        text_width(self.tokenizer.vocabulary, self.length)
        if self.plan.packing not in ("packed", "padded"):
            raise UserError(f"data.packing {self.plan.packing} needs prepared shards; stream by packed or padded")

    def batches(self, start: Position = START) -> Iterator[Batch]:
        return prefetch(self._batches(start))

    def _batches(self, start: Position) -> Iterator[Batch]:
        rows = self._padded(start) if self.plan.packing == "padded" else self._packed(start)
        share = self.batch_size // self.num_ranks
        vocabulary = self.tokenizer.vocabulary
        bos, eos = row_frame(vocabulary)
        x = np.full((share, self.length), padding_id(vocabulary), np.int64)
        used = np.zeros(share, np.int64)
        while True:
            x[:] = padding_id(vocabulary)
            for number in range(self.batch_size):
                ids, after = next(rows)
                mine = number - self.rank * share
                if 0 <= mine < share:
                    row = [*bos, *ids, *eos]
                    x[mine, : len(row)], used[mine] = row, len(row)
            pad = np.arange(self.length) >= used[:, None] if self.plan.packing == "padded" else None
            yield Batch(torch.tensor(x), None if pad is None else torch.from_numpy(pad), after)

    def _packed(self, start: Position) -> Iterator[tuple[list[int], Position]]:
        """Full rows of joined documents, and the position after each."""
        width = text_width(self.tokenizer.vocabulary, self.length)
        held: list[int] = []
        skipped = start.row
        for document, ids in self._documents(start.epoch):
            ids = ids[skipped:]
            used, skipped = skipped, 0
            while len(held) + len(ids) >= width:
                room = width - len(held)
                used += room
                yield held + ids[:room], Position(document, used)
                held, ids = [], ids[room:]
            held += ids

    def _padded(self, start: Position) -> Iterator[tuple[list[int], Position]]:
        """One document a row, cut at its end."""
        width = text_width(self.tokenizer.vocabulary, self.length)
        marks = 0 if self.tokenizer.vocabulary.eos_id is None else 1
        for document, ids in self._documents(start.epoch):
            yield ids[: min(width, len(ids) - marks)], Position(document + 1, 0)

    def _documents(self, first: int) -> Iterator[tuple[int, list[int]]]:
        """The numbers and ids of the split's documents from the first asked for, epoch after epoch."""
        eos = [] if self.tokenizer.vocabulary.eos_id is None else [self.tokenizer.vocabulary.eos_id]
        waiting: list[tuple[int, list[str]]] = []
        for number, pieces in self._in_order():
            if number < first:
                continue
            waiting.append((number, pieces))
            if len(waiting) == AHEAD:
                yield from self._encoded(waiting, eos)
                waiting = []

    def _encoded(self, documents: list[tuple[int, list[str]]], eos: list[int]) -> Iterator[tuple[int, list[int]]]:
        rows = iter(self.tokenizer.encode_batch([piece for _, pieces in documents for piece in pieces]))
        for number, pieces in documents:
            yield number, [*chain.from_iterable(islice(rows, len(pieces))), *eos]

    def _in_order(self) -> Iterator[tuple[int, list[str]]]:
        """Every document of the split in its pieces, numbered, for ever."""
        number = 0
        while True:
            before, document = number, 0
            for part in self.plan.parts:
                pieces: list[str] = []
                for text, ends in part.pieces():
                    pieces.append(text)
                    if not ends:
                        continue
                    if self.plan.split_of(part, document) == self.split:
                        yield number, pieces
                        number += 1
                    document, pieces = document + 1, []
            if number == before:
                raise UserError(f"{self.plan.title} has no document in its split {self.split!r}")
