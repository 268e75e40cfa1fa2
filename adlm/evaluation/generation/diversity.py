"""How varied texts are: entropy, distinct n-grams, repetition, length. Pure functions of ids; knows no models.

Shapes: a sample is a sequence of n ids. What a sample is too short for has no value (None), and a mean says of how many
samples it is.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NGRAMS = (1, 2, 3, 4)
REPEATED = 4  # rep-4: how long a repeated piece must be

Ids = Sequence[int]


@dataclass(frozen=True)
class Mean:
    """A mean over samples and its standard error."""

    value: float | None
    """None where no sample has a value."""
    stderr: float | None
    """None where fewer than two have one."""
    num: int
    """How many samples it is of."""


@dataclass(frozen=True)
class Lengths:
    mean: Mean
    least: int
    median: float
    most: int


@dataclass(frozen=True)
class Diversity:
    """What a set of samples looks like."""

    distinct: dict[int, Mean]
    """By n: different n-grams of a sample / its n-grams, mean over samples."""
    distinct_in_all: dict[int, float | None]
    """By n: different n-grams of all samples / their n-grams. It falls as samples are added: compare equal numbers."""
    repeated: Mean
    """rep-4: the share of a sample's tokens that stand in a 4-gram that the sample has more than once."""
    longest_repeat: Mean
    """Tokens of the longest piece that a sample has more than once; the two may overlap."""
    tokens: Lengths


def mean_of(values: Iterable[float | None]) -> Mean:
    """The mean of what there is; its standard error is sqrt(sum (v - mean)^2 / (n - 1) / n)."""
    there = np.array([value for value in values if value is not None], np.float64)
    if not len(there):
        return Mean(None, None, 0)
    stderr = float(there.std(ddof=1) / math.sqrt(len(there))) if len(there) > 1 else None
    return Mean(float(there.mean()), stderr, len(there))


def unigram_entropy(ids: Ids) -> float | None:
    """-sum p log p, in nats, of the sample's own token frequencies p; at most log n. An empty sample has none.

    As published: every id counts, bos, eos and padding too.
    """
    if not len(ids):
        return None
    counts = np.unique(np.asarray(ids, np.int64), return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def distinct(ids: Ids, n: int) -> float | None:
    """Different n-grams / n-grams; 1 - this is what is called seq-rep-n."""
    pieces = _pieces(ids, n)
    return len(set(pieces)) / len(pieces) if pieces else None


def distinct_in_all(samples: Iterable[Ids], n: int) -> float | None:
    """The same over the n-grams of all samples together."""
    seen: set[bytes] = set()
    num = 0
    for ids in samples:
        pieces = _pieces(ids, n)
        seen.update(pieces)
        num += len(pieces)
    return len(seen) / num if num else None


def repeated(ids: Ids, n: int = REPEATED) -> float | None:
    """The share of tokens that stand in an n-gram that occurs more than once."""
    pieces = _pieces(ids, n)
    if not pieces:
        return None
    times: dict[bytes, int] = {}
    for piece in pieces:
        times[piece] = times.get(piece, 0) + 1
    covered = np.zeros(len(ids), bool)
    for start, piece in enumerate(pieces):
        if times[piece] > 1:
            covered[start : start + n] = True
    return float(covered.mean())


def longest_repeat(ids: Ids) -> int | None:
    """The most tokens in a row that occur twice. Where some do, any fewer do, so the number is found by halving."""
    if not len(ids):
        return None
    low, high = 0, len(ids) - 1  # a repeat of `low` is there, none longer than `high`
    while low < high:
        n = (low + high + 1) // 2
        pieces = _pieces(ids, n)
        if len(set(pieces)) < len(pieces):
            low = n
        else:
            high = n - 1
    return low


def lengths_of(lengths: Sequence[int]) -> Lengths:
    return Lengths(mean_of(lengths), min(lengths), float(np.median(lengths)), max(lengths))


def diversity_of(samples: Sequence[Ids]) -> Diversity:
    return Diversity(
        distinct={n: _mean(samples, lambda ids, n=n: distinct(ids, n)) for n in NGRAMS},  # type: ignore[misc]
        distinct_in_all={n: distinct_in_all(samples, n) for n in NGRAMS},
        repeated=_mean(samples, repeated),
        longest_repeat=_mean(samples, longest_repeat),
        tokens=lengths_of([len(ids) for ids in samples]),
    )


def entropy_of(samples: Sequence[Ids]) -> Mean:
    return _mean(samples, unigram_entropy)


def _mean(samples: Sequence[Ids], value: Callable[[Any], float | None]) -> Mean:
    return mean_of(value(ids) for ids in samples)


def _pieces(ids: Ids, n: int) -> list[bytes]:
    """Every n ids in a row, as bytes: they compare and hash fast."""
    data = np.asarray(ids, np.int32).tobytes()
    return [data[4 * start : 4 * (start + n)] for start in range(len(ids) - n + 1)]
