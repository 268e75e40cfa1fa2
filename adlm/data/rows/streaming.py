"""Batches that are tokenised during training, in the order of the source's documents. Writes nothing.

For text that is too large to store twice. The order is that of the source, without shuffling. A Position is the number
of documents that end before the next row, over all epochs, and the number of ids of the next document that are already
used; to resume, the documents before it are read but not tokenised. Every rank tokenises every document, because the
start of a row depends on all documents before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch

from adlm.data.rows.loader import START, Batch, Position, check_ranks, prefetch
from adlm.data.rows.packing import padding_id, row_boundaries, text_width
from adlm.data.sources.source import Source
from adlm.errors import UserError
from adlm.tokens import Tokenizer

NUM_ENCODED = 64  # documents encoded at once


@dataclass(frozen=True)
class Stream:
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

    def batches(self, start: Position = START) -> Iterator[Batch]:
        return prefetch(self._batches(start))

    def _batches(self, start: Position) -> Iterator[Batch]:
        rows = self._padded(start) if self.source.packing == "padded" else self._packed(start)
        share = self.batch_size // self.num_ranks
        vocabulary = self.tokenizer.vocabulary
        bos, eos = row_boundaries(vocabulary)
        x = np.full((share, self.length), padding_id(vocabulary), np.int64)
        used = np.zeros(share, np.int64)
        while True:
            x[:] = padding_id(vocabulary)
            for number in range(self.batch_size):
                ids, after = next(rows)
                index = number - self.rank * share
                if 0 <= index < share:
                    row = [*bos, *ids, *eos]
                    x[index, : len(row)], used[index] = row, len(row)
            pad = np.arange(self.length) >= used[:, None] if self.source.packing == "padded" else None
            yield Batch(torch.tensor(x), None if pad is None else torch.from_numpy(pad), after)

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
                yield from self._encode(pending, eos)
                pending = []

    def _encode(self, documents: list[tuple[int, list[str]]], eos: list[int]) -> Iterator[tuple[int, list[int]]]:
        rows = iter(self.tokenizer.encode_batch([chunk for _, chunks in documents for chunk in chunks]))
        for number, chunks in documents:
            yield number, [*chain.from_iterable(islice(rows, len(chunks))), *eos]

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
