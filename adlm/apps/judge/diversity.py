"""Diversity of texts: entropy, distinct n-grams, repetition, length. Pure functions of token ids; no models.

Shapes: a sample is a sequence of n ids. A metric is None for a sample that is too short; a mean has the number of
samples it is over.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NGRAMS = (1, 2, 3, 4)
REPEATED = 4  # the n of rep-n

Ids = Sequence[int]


@dataclass(frozen=True)
class Mean:
    """A mean over samples and its standard error."""

    value: float | None
    """None where no sample has a value."""
    stderr: float | None
    """None where fewer than two samples have a value."""
    num: int
    """Number of samples with a value."""


@dataclass(frozen=True)
class Lengths:
    mean: Mean
    least: int
    median: float
    most: int


@dataclass(frozen=True)
class Diversity:
    """Diversity metrics of a set of samples."""

    distinct: dict[int, Mean]
    """By n: distinct n-grams of a sample / its n-grams, mean over samples."""
    distinct_in_all: dict[int, float | None]
    """By n: distinct n-grams of all samples / their n-grams. Falls with more samples: compare equal numbers."""
    repeated: Mean
    """rep-4: the fraction of a sample's tokens that are in a 4-gram that occurs more than once in the sample."""
    longest_repeat: Mean
    """Tokens of the longest sequence that occurs more than once in a sample; occurrences may overlap."""
    tokens: Lengths


def mean_of(values: Iterable[float | None]) -> Mean:
    """The mean of the values that are not None; its standard error is sqrt(sum (v - mean)^2 / (n - 1) / n)."""
    known = np.array([value for value in values if value is not None], np.float64)
    if not len(known):
        return Mean(None, None, 0)
    stderr = float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    return Mean(float(known.mean()), stderr, len(known))


def unigram_entropy(ids: Ids) -> float | None:
    """-sum p log p, in nats, of the sample's token frequencies p; at most log n. None for an empty sample.

    As published, every id counts, including bos, eos and padding.
    """
    if not len(ids):
        return None
    counts = np.unique(np.asarray(ids, np.int64), return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def distinct(ids: Ids, n: int) -> float | None:
    """Distinct n-grams / n-grams; seq-rep-n is 1 minus this."""
    ngrams = _ngrams(ids, n)
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def distinct_in_all(samples: Iterable[Ids], n: int) -> float | None:
    """Distinct n-grams / n-grams, over all samples together."""
    seen: set[bytes] = set()
    num = 0
    for ids in samples:
        ngrams = _ngrams(ids, n)
        seen.update(ngrams)
        num += len(ngrams)
    return len(seen) / num if num else None


def repeated(ids: Ids, n: int = REPEATED) -> float | None:
    """The fraction of tokens that are in an n-gram that occurs more than once."""
    ngrams = _ngrams(ids, n)
    if not ngrams:
        return None
    counts_by_ngram: dict[bytes, int] = {}
    for ngram in ngrams:
        counts_by_ngram[ngram] = counts_by_ngram.get(ngram, 0) + 1
    covered = np.zeros(len(ids), bool)
    for start, ngram in enumerate(ngrams):
        if counts_by_ngram[ngram] > 1:
            covered[start : start + n] = True
    return float(covered.mean())


def longest_repeat(ids: Ids) -> int | None:
    """The length of the longest sequence that occurs twice. Its prefixes occur twice too, so bisection finds it."""
    if not len(ids):
        return None
    low, high = 0, len(ids) - 1  # there is a repeat of length `low`, none longer than `high`
    while low < high:
        n = (low + high + 1) // 2
        ngrams = _ngrams(ids, n)
        if len(set(ngrams)) < len(ngrams):
            low = n
        else:
            high = n - 1
    return low


def lengths_of(lengths: Sequence[int]) -> Lengths:
    return Lengths(mean_of(lengths), min(lengths), float(np.median(lengths)), max(lengths))


def diversity_of(samples: Sequence[Ids]) -> Diversity:
    return Diversity(
        distinct={n: mean_of(distinct(ids, n) for ids in samples) for n in NGRAMS},
        distinct_in_all={n: distinct_in_all(samples, n) for n in NGRAMS},
        repeated=mean_of(map(repeated, samples)),
        longest_repeat=mean_of(map(longest_repeat, samples)),
        tokens=lengths_of([len(ids) for ids in samples]),
    )


def entropy_of(samples: Sequence[Ids]) -> Mean:
    return mean_of(map(unigram_entropy, samples))


def _ngrams(ids: Ids, n: int) -> list[bytes]:
    """All n-grams as bytes, which hash and compare fast."""
    data = np.asarray(ids, np.int32).tobytes()
    return [data[4 * start : 4 * (start + n)] for start in range(len(ids) - n + 1)]
