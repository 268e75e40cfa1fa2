"""Rows rearranged for infilling: a text with holes, then what was in them. For models that write from left to right.

    before  bos a b c d e f g h i
    after   bos a H H d e eos b c eos          a hole of known length: as many hole ids H as tokens are missing
    after   bos a H eos d e f eos b c eos      of unknown length: one H and an eos

What is missing comes after the text, hole after hole, each ended by eos. The row keeps its length: text at its end is
dropped to make room. Holes have no eos inside, so the first one after a hole ends it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

TWO_HOLES, UNKNOWN_LENGTH = 0.3, 0.5
"""Shares of the rearranged rows, and of their holes."""
LARGEST_HOLE = 1 / 4
"""Of the row, at most; all lengths up to it are equally likely."""


@dataclass(frozen=True)
class Hole:
    """The tokens from `start` to `stop` of a text are missing."""

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

    def __call__(self, x: Ids, draws: NDArray[np.float64]) -> Ids:
        """Rows x (B, L), each with a uniform random number from which all its choices follow."""
        rows = []
        for row, draw in zip(x, draws, strict=True):
            rng = np.random.default_rng(int(draw * 2.0**53))
            rows.append(self.row(row, rng) if rng.random() < self.share else row)
        return np.stack(rows)

    def row(self, row: Ids, rng: np.random.Generator) -> Ids:
        """One row, rearranged; as it is if no hole was found."""
        num = 1 + int(rng.random() < TWO_HOLES)
        sizes = [int(size) for size in rng.integers(1, max(2, int(len(row) * LARGEST_HOLE / num)), num)]
        known = [bool(is_known) for is_known in rng.random(num) >= UNKNOWN_LENGTH]
        # bos + text with holes + eos + (missing tokens + eos) for each hole = len(row)
        saved = sum(size - 2 for size, is_known in zip(sizes, known, strict=True) if not is_known)
        length = len(row) - 2 - sum(size + 1 for size in sizes) + saved
        text = row[1 : 1 + length]
        edges = np.sort(rng.integers(0, max(1, length - sum(sizes)) + 1, num))
        holes, shift = [], 0
        for edge, size, is_known in zip(edges.tolist(), sizes, known, strict=True):
            holes.append(Hole(edge + shift, edge + shift + size, is_known))
            shift += size
        missing = [text[hole.start : hole.stop] for hole in holes]
        if length < 1 or [len(part) for part in missing] != sizes or self.eos_id in np.concatenate(missing):
            return row
        arranged = np.concatenate([row[:1], arrange(text, holes, self.hole_id, self.eos_id)])
        assert len(arranged) == len(row)
        return arranged


def arrange(text: Ids, holes: list[Hole], hole_id: int, eos_id: int) -> Ids:
    """The text with holes, eos, and for each hole what is missing and eos."""
    parts = [with_holes(text, holes, hole_id, eos_id)]
    for hole in holes:
        parts += [text[hole.start : hole.stop], np.array([eos_id])]
    return np.concatenate(parts)


def with_holes(text: Ids, holes: list[Hole], hole_id: int, eos_id: int) -> Ids:
    """The text with holes, and eos."""
    end, parts, position = np.array([eos_id]), [], 0
    for hole in holes:
        size = hole.stop - hole.start
        parts += [text[position : hole.start], np.full(size if hole.is_known else 1, hole_id), end[: not hole.is_known]]
        position = hole.stop
    return np.concatenate([*parts, text[position:], end]).astype(np.int64)
