"""Rows rearranged for infilling by models that write from left to right: an outline, then the text, holes filled in.

    before  bos a b c d e f g h i                      c and d are missing, in a text that ends with f
    after   bos H H e f eos a b H c d eos              a hole of known length: as many hole ids H as tokens are missing
    after   bos H eos e f eos a b H c d eos            of unknown length: one H and an eos
    after   bos H eos e H g eos a b H c d eos e H f eos    two holes: c d of unknown length, and f

The outline is the text from the first hole on, with hole ids in its holes, and an eos. Then comes the text itself, up
to the end of the last hole. So what is missing follows the text before it, after a hole id that says that the hole
begins: without it, a network would not know how far the text after the hole is. An eos ends every hole of unknown
length, and the last hole. Holes have no eos inside, so the first one in a hole of unknown length ends it.

Text between two holes is there twice; nothing is to be learnt from the second time, a copy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Copies = NDArray[np.bool_]
"""(..., L), True at text that is there for the second time."""

TWO_HOLES, UNKNOWN_LENGTH = 0.3, 0.5
"""Shares of the rearranged rows, and of their holes."""
SHORTEST_TEXT = 16
"""Tokens of a text with holes, at least; up to what fits, the logarithm of its length is uniform."""
LARGEST_HOLE = 1 / 4
"""Of the text, at most, or half of it for each of two; all lengths up to it are equally likely."""
TRIES = 8
"""How often a text and its holes are drawn for a row, until they fit and no eos is in a hole."""


@dataclass(frozen=True)
class RowHole:
    """The tokens from `start` to `stop` of a row are missing."""

    start: int
    stop: int
    is_known: bool
    """Whether the length is."""


@dataclass(frozen=True)
class Rearrangement:
    """Rearranges a share of rows."""

    share: float
    hole_id: int
    eos_id: int

    def __call__(self, x: Ids, draws: NDArray[np.float64]) -> tuple[Ids, Copies]:
        """Rows x (B, L), some rearranged, and their copies. All choices in a row follow from its random number."""
        rows = []
        for row, draw in zip(x, draws, strict=True):
            rng = np.random.default_rng(int(draw * 2.0**53))
            rows.append(self.row(row, rng) if rng.random() < self.share else (row, np.zeros(len(row), np.bool_)))
        ids, copies = zip(*rows, strict=True)
        return np.stack(ids), np.stack(copies)

    def row(self, row: Ids, rng: np.random.Generator) -> tuple[Ids, Copies]:
        """One row: a text from its beginning, rearranged, and what follows that text, as far as there is room.

        The row as it is if no holes were found.
        """
        num = 1 + int(rng.random() < TWO_HOLES)
        shortest, longest = min(SHORTEST_TEXT, len(row) // 2), len(row) - 5  # bos, two eos and two hole ids
        for _ in range(TRIES if shortest <= longest else 0):
            length = int(shortest * ((longest + 1) / shortest) ** rng.random())
            sizes = rng.integers(1, max(1, int(length * LARGEST_HOLE / num)) + 1, num)
            known = rng.random(num) >= UNKNOWN_LENGTH
            starts = 1 + np.sort(rng.integers(0, length - sizes.sum() + 1, num)) + sizes.cumsum() - sizes
            holes = list(map(RowHole, starts.tolist(), (starts + sizes).tolist(), known.tolist()))
            ids, copies = arrange(row[: 1 + length], holes, self.hole_id, self.eos_id)
            room = len(row) - len(ids)
            if room >= 0 and not any(self.eos_id in row[hole.start : hole.stop] for hole in holes):
                return np.concatenate([ids, row[1 + length :][:room]]), np.pad(copies, (0, room))
        return row, np.zeros(len(row), np.bool_)


def arrange(row: Ids, holes: list[RowHole], hole_id: int, eos_id: int) -> tuple[Ids, Copies]:
    """The row, a text from bos to its last token, rearranged, and the copies in it."""
    end, begin, parts = np.array([eos_id]), np.array([hole_id]), [before_first_hole(row, holes, hole_id, eos_id)]
    for hole, after in zip(holes, [*holes[1:], None], strict=True):
        between = row[hole.stop : hole.stop if after is None else after.start]
        ended = end[: after is None or not hole.is_known]
        parts += [row[hole.start : hole.stop], ended, between, begin[: after is not None]]
    are_copies = [False, *[False, False, True, False] * len(holes)]
    return np.concatenate(parts), np.repeat(are_copies, [len(part) for part in parts])


def before_first_hole(row: Ids, holes: list[RowHole], hole_id: int, eos_id: int) -> Ids:
    """The first token, the outline with its eos, the text before the first hole, and a hole id."""
    end, parts, position = np.array([eos_id]), [row[:1]], holes[0].start
    for hole in holes:
        size = hole.stop - hole.start
        parts += [row[position : hole.start], np.full(size if hole.is_known else 1, hole_id), end[: not hole.is_known]]
        position = hole.stop
    return np.concatenate([*parts, row[position:], end, row[1 : holes[0].start], [hole_id]]).astype(np.int64)
