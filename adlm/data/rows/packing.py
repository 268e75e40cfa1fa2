"""Arranges the documents of a split in rows of `length` ids, by the protocols of the literature. No epochs, no tensors.

Shapes: n rows of L ids; `pad` is True at padding. A row is [bos] L - 2 ids [eos] if the vocabulary has both, as in the
released code. Rows are built when they are read, so that a prepared split can be used with any length. The row of a
conversation is [bos] and its ids, which include what ends it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from adlm.config.schema import Vocabulary
from adlm.data.prepare.shards import Tokens
from adlm.errors import UserError

PAIRS: Final = "pairs"
"""The packing of conversations, which has no other one."""
DOCUMENTS_PER_BATCH = 1000  # documents that the released code concatenates at a time


class RowLayout(Protocol):
    """Maps each row to a range of ids in the split."""

    def __len__(self) -> int: ...

    def span(self, row: int, draw: float) -> tuple[int, int]:
        """The range [start, stop) of the row's ids; `draw` from [0, 1) selects the start of random crops."""
        ...

    def num_ids(self) -> int:
        """Total number of ids in all rows."""
        ...


@dataclass(frozen=True)
class Packed:
    """All documents concatenated. The last row is short, or with `overlap` starts earlier so that it is full."""

    num_tokens: int
    width: int
    overlap: bool = False

    def __len__(self) -> int:
        return -(-self.num_tokens // self.width)

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start, stop = row * self.width, min((row + 1) * self.width, self.num_tokens)
        return (max(0, stop - self.width) if self.overlap else start), stop

    def num_ids(self) -> int:
        return self.num_tokens


class PackedPublished:
    """Every thousand documents concatenated separately, dropping the incomplete last row, as in the released code."""

    def __init__(self, ends: NDArray[np.uint64], width: int):
        self.width = width
        full, rest = ends[DOCUMENTS_PER_BATCH - 1 :: DOCUMENTS_PER_BATCH], len(ends) % DOCUMENTS_PER_BATCH
        last = np.append(full, ends[-1:] if rest else ends[:0]).astype(np.int64)
        self.starts = np.concatenate(([0], last[:-1])).astype(np.int64)
        self.rows_before = np.concatenate(([0], np.cumsum((last - self.starts) // width)))

    def __len__(self) -> int:
        return int(self.rows_before[-1])

    def span(self, row: int, draw: float) -> tuple[int, int]:
        batch = int(np.searchsorted(self.rows_before, row, side="right")) - 1
        start = int(self.starts[batch] + (row - self.rows_before[batch]) * self.width)
        return start, start + self.width

    def num_ids(self) -> int:
        return len(self) * self.width


@dataclass(frozen=True)
class Padded:
    """One document per row, truncated to the row, without the eos that follows it in the split."""

    tokens: Tokens
    width: int
    num_marks: int
    """Number of ids after each document in the split: 1 for eos, or 0."""

    def __len__(self) -> int:
        return self.tokens.extent.documents

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start, stop = self.tokens.document(row)
        return start, min(stop - self.num_marks, start + self.width)

    def num_ids(self) -> int:
        lengths = np.diff(np.asarray(self.tokens.ends, np.int64), prepend=0) - self.num_marks
        return int(np.minimum(lengths, self.width).sum())


@dataclass(frozen=True)
class Cropped:
    """One row from every two row widths of text, starting at a random position in the first half."""

    num_tokens: int
    width: int

    def __len__(self) -> int:
        return -(-self.num_tokens // (2 * self.width))

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start = row * 2 * self.width
        start += int(draw * (min(self.width, max(0, self.num_tokens - start - self.width)) + 1))
        return start, min(start + self.width, self.num_tokens)

    def num_ids(self) -> int:
        last = self.num_tokens - (len(self) - 1) * 2 * self.width
        return (len(self) - 1) * self.width + min(last, self.width)


class WholeConversations:
    """One conversation per row; those that are longer than the row are left out."""

    def __init__(self, tokens: Tokens, width: int):
        self.tokens, lengths = tokens, np.diff(np.asarray(tokens.ends, np.int64), prepend=0)
        self.numbers = np.flatnonzero(lengths <= width)
        self.num_in_rows, self.longest = int(lengths[self.numbers].sum()), int(lengths[self.numbers].max(initial=0))

    def __len__(self) -> int:
        return len(self.numbers)

    def span(self, row: int, draw: float) -> tuple[int, int]:
        return self.tokens.document(int(self.numbers[row]))

    def num_ids(self) -> int:
        return self.num_in_rows


LAYOUTS: dict[str, Callable[[Tokens, int, int, bool], RowLayout]] = {
    "packed": lambda tokens, width, num_marks, overlap: Packed(len(tokens), width, overlap),
    "packed-published": lambda tokens, width, num_marks, overlap: PackedPublished(tokens.ends, width),
    "padded": lambda tokens, width, num_marks, overlap: Padded(tokens, width, num_marks),
    "padded-published": lambda tokens, width, num_marks, overlap: Padded(tokens, width, num_marks),
    "cropped": lambda tokens, width, num_marks, overlap: Cropped(len(tokens), width),
    PAIRS: lambda tokens, width, num_marks, overlap: WholeConversations(tokens, width),
}


@dataclass(frozen=True)
class Rows:
    """A split as rows of one length: `len(rows)`, `rows[i]`, and `rows.read(numbers)` for several rows."""

    tokens: Tokens
    vocabulary: Vocabulary
    length: int
    layout: RowLayout
    packing: str
    """A key of LAYOUTS. Padded packings and pairs return a pad mask for every batch, others only if a row is short."""
    clusters: NDArray[np.int64] | None = None
    """The cluster of each document, if neighbouring documents are dependent; see `documents`."""

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def num_tokens(self) -> int:
        """Number of ids in all rows, without the bos and eos around each row."""
        return self.layout.num_ids()

    def __getitem__(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        x, pad = self.read([row])
        return x[0], np.zeros(self.length, bool) if pad is None else pad[0]

    def read(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        draws: Sequence[float] | NDArray[np.float64] | None = None,
        kept: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """ids (n, L) and pad (n, L); pad is None if no row is padded.

        Of the text of each row its first `kept` (n,) from (0, 1] is kept, rounded up to tokens; None is all of it. What
        stands before and after the text stays, so that a row is that of a shorter length, padded. Then pad is not None.
        """
        bos, eos = row_frame(self.vocabulary, self.packing)
        first = len(bos)
        x = np.full((len(rows), self.length), self.vocabulary.padding_id, np.int64)
        used = np.empty(len(rows), np.int64)
        for index, (start, stop) in enumerate(self._spans(rows, draws, kept)):
            end = first + stop - start
            x[index, :first] = bos
            self.tokens.copy_to(x[index, first:], start, stop)
            x[index, end : end + len(eos)] = eos
            used[index] = end + len(eos)
        if kept is None and not self.packing.startswith(("padded", PAIRS)) and (used == self.length).all():
            return x, None
        return x, np.arange(self.length) >= used[:, None]

    def given(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """(n, L), True at ids that the assistant does not write, and at padding; None for running text."""
        return None if self.tokens.is_answer is None else ~self._marks(self.tokens.is_answer, self._spans(rows))

    def labels(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        draws: Sequence[float] | NDArray[np.float64] | None = None,
        kept: NDArray[np.float64] | None = None,
    ) -> NDArray[np.bool_] | None:
        """(n, L), True at labelled ids of the rows that `read` gives; None for text without labels."""
        if self.tokens.is_labelled is None:
            return None
        return self._marks(self.tokens.is_labelled, self._spans(rows, draws, kept))

    def _spans(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        draws: Sequence[float] | NDArray[np.float64] | None = None,
        kept: NDArray[np.float64] | None = None,
    ) -> list[tuple[int, int]]:
        """The range of ids in the split of each row's text; see `read`."""
        spans = [
            self.layout.span(int(row), 0.0 if draws is None else float(draws[index])) for index, row in enumerate(rows)
        ]
        if kept is None:
            return spans
        return [
            (start, start + math.ceil(share * (stop - start))) for (start, stop), share in zip(spans, kept, strict=True)
        ]

    def _marks(self, is_marked: NDArray[np.bool_], spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
        """(n, L), what is stored for the ids of each row; False at bos, eos and padding around its text."""
        first, marks = len(self.vocabulary.row_boundaries[0]), np.zeros((len(spans), self.length), np.bool_)
        for row, (start, stop) in zip(marks, spans, strict=True):
            row[first : first + stop - start] = is_marked[start:stop]
        return marks

    def without_common_padding(self) -> "Rows":
        """Conversations in rows as long as the longest of them; running text as it is."""
        if not isinstance(self.layout, WholeConversations):
            return self
        return replace(self, length=len(self.vocabulary.row_boundaries[0]) + self.layout.longest)

    def notes(self) -> tuple[str, ...]:
        """What of the split is in no row, for conversations."""
        total = self.tokens.extent.documents
        if self.packing != PAIRS or len(self) == total:
            return ()
        what = f"{total - len(self):,} of {total:,} conversations in {self.tokens.folder.name}"
        return (f"{what} are left out: they do not fit into a row of length {self.length}",)

    def in_parts(self, size: int = 4096) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """All rows in order, `size` at a time: ids (n, L), and the positions that count as tokens (n, L)."""
        for start in range(0, len(self), size):
            x, pad = self.read(range(start, min(start + size, len(self))))
            yield x, self.counted(x, pad)

    def counted(self, x: NDArray[np.int64], pad: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """(n, L), True at the positions that count as tokens in per-token means; see `counted_positions`."""
        return counted_positions(x, pad, self.vocabulary, self.packing)

    def documents(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, L), the document of each position, or its document's cluster if `clusters` is set.

        bos, eos and padding of a row belong to the adjacent document.
        """
        first = len(self.vocabulary.row_boundaries[0])
        found = np.empty((len(rows), self.length), np.int64)
        for index, row in enumerate(rows):
            start, stop = self.layout.span(int(row), 0.0)
            positions = np.clip(np.arange(self.length) - first + start, start, max(start, stop - 1))
            found[index] = np.searchsorted(self.tokens.ends, positions, side="right")
        return found if self.clusters is None else self.clusters[found]


def counted_positions(
    x: NDArray[np.int64], pad: NDArray[np.bool_] | None, vocabulary: Vocabulary, packing: str | None
) -> NDArray[np.bool_]:
    """(n, L), True at the positions that count as tokens in per-token means: document ids and the eos after each.

    The bos and eos around a row are trivial to predict: their nats are added to the sum, but they are not counted
    as tokens. `packed-published` and `padded-published` count them, as the released code does.
    """
    used = np.full(len(x), x.shape[1]) if pad is None else (~pad).sum(axis=1)
    is_published = packing is not None and packing.endswith("-published")
    bos, eos = ([], []) if is_published else row_frame(vocabulary, packing)
    positions = np.arange(x.shape[1])
    return (positions >= len(bos)) & (positions < (used - len(eos))[:, None])


def row_frame(vocabulary: Vocabulary, packing: str | None) -> tuple[list[int], list[int]]:
    """The ids before and after the text of a row."""
    bos, eos = vocabulary.row_boundaries
    return bos, [] if packing == PAIRS else eos


def text_width(vocabulary: Vocabulary, length: int) -> int:
    """Number of document ids in a row of this length."""
    bos, eos = vocabulary.row_boundaries
    width = length - len(bos) - len(eos)
    if width < 1:
        raise UserError(f"length {length} leaves no room for text between bos and eos; try length=16")
    return width


def rows_of(tokens: Tokens, vocabulary: Vocabulary, length: int, packing: str, overlap: bool = False) -> Rows:
    """The rows of a split. With `overlap`, the last row of a packed split is filled with ids of the row before it.

    Training uses `overlap`; likelihoods count every id once, so they use the short last row.
    """
    width = length - len(vocabulary.row_boundaries[0]) if packing == PAIRS else text_width(vocabulary, length)
    num_marks = 0 if vocabulary.eos_id is None else 1
    layout = LAYOUTS[packing](tokens, width, num_marks, overlap)
    if len(layout) == 0 and packing == PAIRS:
        raise UserError(
            f"none of the {tokens.extent.documents:,} conversations of split {tokens.folder.name} fits into a row of "
            f"length {length}; give a larger length"
        )
    if len(layout) == 0:
        raise UserError(
            f"split {tokens.folder.name}: {len(tokens):,} tokens in {tokens.extent.documents:,} documents fill no row "
            f"of length {length} by data.packing {packing}, which drops what is left over; try data.packing=packed or "
            "a smaller length"
        )
    return Rows(tokens, vocabulary, length, layout, packing)
