"""Rows of `length` ids from a split's documents, by the protocols that papers use. Knows no epochs and no tensors.

Shapes: n rows of L ids; `pad` is True at padding. A row is [bos] L - 2 ids [eos] where the vocabulary has both, as in
the released code. Rows are cut when they are asked for, so that a prepared split serves any length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adlm.config.schema import Vocabulary
from adlm.data.prepare.shards import Tokens
from adlm.errors import UserError

DOCUMENTS_AT_ONCE = 1000  # that the released code joins


class Layout(Protocol):
    """Where each row's ids lie in a split."""

    def __len__(self) -> int: ...

    def span(self, row: int, draw: float) -> tuple[int, int]:
        """The first id and the one after the last; `draw` from [0, 1) chooses where a row may begin anywhere."""
        ...

    def num_held(self) -> int:
        """How many ids all rows hold, for one draw."""
        ...


@dataclass(frozen=True)
class Packed:
    """All documents joined; the last row is short, or with `overlap` reaches back so that it is full."""

    num_tokens: int
    width: int
    overlap: bool = False

    def __len__(self) -> int:
        return -(-self.num_tokens // self.width)

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start, stop = row * self.width, min((row + 1) * self.width, self.num_tokens)
        return (max(0, stop - self.width) if self.overlap else start), stop

    def num_held(self) -> int:
        return self.num_tokens


class Published:
    """Each thousand documents joined on their own, and what does not fill a row dropped: the released code's cut."""

    def __init__(self, ends: NDArray[np.uint64], width: int):
        self.width = width
        full, rest = ends[DOCUMENTS_AT_ONCE - 1 :: DOCUMENTS_AT_ONCE], len(ends) % DOCUMENTS_AT_ONCE
        last = np.append(full, ends[-1:] if rest else ends[:0]).astype(np.int64)
        self.starts = np.concatenate(([0], last[:-1])).astype(np.int64)
        self.rows_before = np.concatenate(([0], np.cumsum((last - self.starts) // width)))

    def __len__(self) -> int:
        return int(self.rows_before[-1])

    def span(self, row: int, draw: float) -> tuple[int, int]:
        batch = int(np.searchsorted(self.rows_before, row, side="right")) - 1
        start = int(self.starts[batch] + (row - self.rows_before[batch]) * self.width)
        return start, start + self.width

    def num_held(self) -> int:
        return len(self) * self.width


@dataclass(frozen=True)
class Padded:
    """One row a document, cut at the row's end, without the eos that follows it in the split."""

    tokens: Tokens
    width: int
    num_marks: int
    """How many ids follow each document in the split: its eos, or none."""

    def __len__(self) -> int:
        return self.tokens.extent.documents

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start, stop = self.tokens.document(row)
        return start, min(stop - self.num_marks, start + self.width)

    def num_held(self) -> int:
        lengths = np.diff(np.asarray(self.tokens.ends, np.int64), prepend=0) - self.num_marks
        return int(np.minimum(lengths, self.width).sum())


@dataclass(frozen=True)
class Cropped:
    """One row from every stretch of two, beginning anywhere in its first half."""

    num_tokens: int
    width: int

    def __len__(self) -> int:
        return -(-self.num_tokens // (2 * self.width))

    def span(self, row: int, draw: float) -> tuple[int, int]:
        start = row * 2 * self.width
        start += int(draw * (min(self.width, max(0, self.num_tokens - start - self.width)) + 1))
        return start, min(start + self.width, self.num_tokens)

    def num_held(self) -> int:
        last = self.num_tokens - (len(self) - 1) * 2 * self.width
        return (len(self) - 1) * self.width + min(last, self.width)


LAYOUTS: dict[str, Callable[[Tokens, int, int, bool], Layout]] = {
    "packed": lambda tokens, width, num_marks, overlap: Packed(len(tokens), width, overlap),
    "packed-published": lambda tokens, width, num_marks, overlap: Published(tokens.ends, width),
    "padded": lambda tokens, width, num_marks, overlap: Padded(tokens, width, num_marks),
    "padded-published": lambda tokens, width, num_marks, overlap: Padded(tokens, width, num_marks),
    "cropped": lambda tokens, width, num_marks, overlap: Cropped(len(tokens), width),
}


@dataclass(frozen=True)
class Rows:
    """A split as rows of one length: `len(rows)`, and `rows.read(numbers)`; `rows[i]` is one of them."""

    tokens: Tokens
    vocabulary: Vocabulary
    length: int
    layout: Layout
    packing: str
    """A key of LAYOUTS. Padded rows come with a pad mask in every batch, others only in a batch that needs one."""
    clusters: NDArray[np.int64] | None = None
    """The cluster of each document, where neighbouring documents depend on each other; see `documents`."""

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def num_tokens(self) -> int:
        """Ids of documents that the rows hold, bos and eos of the rows not counted."""
        return self.layout.num_held()

    def __getitem__(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        x, pad = self.read([row])
        return x[0], np.zeros(self.length, bool) if pad is None else pad[0]

    def read(
        self, rows: Sequence[int] | NDArray[np.int64], draws: Sequence[float] | NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """ids (n, L) and pad (n, L), or no pad where there is none."""
        bos, eos = row_frame(self.vocabulary)
        first = len(bos)
        x = np.full((len(rows), self.length), padding_id(self.vocabulary), np.int64)
        used = np.empty(len(rows), np.int64)
        for index, row in enumerate(rows):
            start, stop = self.layout.span(int(row), 0.0 if draws is None else float(draws[index]))
            end = first + stop - start
            x[index, :first] = bos
            self.tokens.copy_to(x[index, first:], start, stop)
            x[index, end : end + len(eos)] = eos
            used[index] = end + len(eos)
        if not self.packing.startswith("padded") and (used == self.length).all():
            return x, None
        return x, np.arange(self.length) >= used[:, None]

    def in_parts(self, size: int = 4096) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """All rows in order, `size` at a time: ids (n, L), and which of them count as tokens."""
        for start in range(0, len(self), size):
            x, pad = self.read(range(start, min(start + size, len(self))))
            yield x, self.counted(x, pad)

    def counted(self, x: NDArray[np.int64], pad: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """(n, L), True at the ids that count as tokens in a mean per token; see `counted_positions`."""
        return counted_positions(x, pad, self.vocabulary, self.packing)

    def documents(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, L), the number of each id's document, or of its document's cluster where there are clusters.

        What frames or fills a row belongs to the neighbouring document.
        """
        first = len(row_frame(self.vocabulary)[0])
        found = np.empty((len(rows), self.length), np.int64)
        for index, row in enumerate(rows):
            start, stop = self.layout.span(int(row), 0.0)
            places = np.clip(np.arange(self.length) - first + start, start, max(start, stop - 1))
            found[index] = np.searchsorted(self.tokens.ends, places, side="right")
        return found if self.clusters is None else self.clusters[found]


def row_frame(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """What opens and closes a row: bos and eos, or nothing where the vocabulary lacks one."""
    if vocabulary.bos_id is None or vocabulary.eos_id is None:
        return [], []
    return [vocabulary.bos_id], [vocabulary.eos_id]


def counted_positions(
    x: NDArray[np.int64], pad: NDArray[np.bool_] | None, vocabulary: Vocabulary, packing: str | None
) -> NDArray[np.bool_]:
    """(n, L), True at the ids that count as tokens in a mean per token: those of documents, with the eos after each.

    The bos and eos that frame a row are almost free to predict and tell nothing of the text: their nats are added to
    the sum and they are not counted. `packed-published` and `padded-published` count them, as the released code does.
    """
    used = np.full(len(x), x.shape[1]) if pad is None else (~pad).sum(axis=1)
    bos, eos = ([], []) if packing is not None and packing.endswith("-published") else row_frame(vocabulary)
    positions = np.arange(x.shape[1])
    return (positions >= len(bos)) & (positions < (used - len(eos))[:, None])


def text_width(vocabulary: Vocabulary, length: int) -> int:
    """How many ids of documents a row of this length holds."""
    bos, eos = row_frame(vocabulary)
    width = length - len(bos) - len(eos)
    if width < 1:
        raise UserError(f"length {length} leaves no room for text between bos and eos; try length=16")
    return width


def rows_of(tokens: Tokens, vocabulary: Vocabulary, length: int, packing: str, overlap: bool = False) -> Rows:
    """A split's rows. With `overlap` a joined split has only full rows, the last of them ids of the one before too.

    Training takes them so; a likelihood counts every id once, so it takes the short last row.
    """
    width = text_width(vocabulary, length)
    num_marks = 0 if vocabulary.eos_id is None else 1
    layout = LAYOUTS[packing](tokens, width, num_marks, overlap)
    if len(layout) == 0:
        raise UserError(
            f"split {tokens.folder.name}: {len(tokens):,} tokens in {tokens.extent.documents:,} documents fill no row "
            f"of length {length} by data.packing {packing}, which drops what is left over; try data.packing=packed or "
            "a smaller length"
        )
    return Rows(tokens, vocabulary, length, layout, packing)


def padding_id(vocabulary: Vocabulary) -> int:
    """The id under padding: pad where there is one, else any that is not the mask."""
    if vocabulary.pad_id is not None:
        return vocabulary.pad_id
    return 0 if vocabulary.mask_id != 0 else 1
