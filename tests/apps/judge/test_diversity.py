"""Entropy, distinct n-grams and repeats against counting by hand and brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.apps.judge.diversity import (
    distinct,
    distinct_in_all,
    diversity_of,
    entropy_of,
    longest_repeat,
    mean_of,
    repeated,
    unigram_entropy,
)

few = st.lists(st.integers(0, 3), max_size=14)


def test_entropy_is_that_of_the_samples_own_frequencies():
    assert unigram_entropy([7, 7, 7]) == 0
    assert unigram_entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    halves = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)  # 1/2, 1/4, 1/4
    assert unigram_entropy([5, 5, 6, 9]) == pytest.approx(halves)
    assert unigram_entropy([]) is None


def test_the_mean_is_over_samples_and_has_their_number():
    mean = entropy_of([[1, 1], [1, 2], []])
    assert mean.value == pytest.approx(math.log(2) / 2)
    assert mean.stderr == pytest.approx(math.log(2) / 2)  # sd of {0, log 2} is log 2 / sqrt 2, of two samples
    assert mean.num == 2


def test_one_sample_has_no_standard_error_and_none_has_no_mean():
    assert mean_of([3.0]).stderr is None
    assert mean_of([None]).value is None
    assert mean_of([None]).num == 0


def test_distinct_n_counts_distinct_ngrams():
    ids = [1, 2, 1, 2, 1]  # 12 21 12 21
    assert distinct(ids, 1) == pytest.approx(2 / 5)
    assert distinct(ids, 2) == pytest.approx(2 / 4)
    assert distinct(ids, 4) == 1
    assert distinct(ids, 6) is None
    assert distinct_in_all([[1, 2], [1, 2], [3]], 1) == pytest.approx(3 / 5)
    assert distinct_in_all([[1, 2], [1, 2], [3]], 2) == pytest.approx(1 / 2)


def test_large_ids_are_not_confused():
    assert distinct([65536, 0, 1, 256, 16777216], 1) == 1


def test_repetition_counts_tokens_in_repeated_ngrams():
    assert repeated([1, 2, 3, 4, 9, 1, 2, 3, 4], 4) == pytest.approx(8 / 9)
    assert repeated([1, 2, 3, 4, 5], 4) == 0
    assert repeated([7] * 6, 4) == 1
    assert repeated([1, 2, 3], 4) is None


@given(few)
def test_the_longest_repeat_is_what_brute_force_finds(ids):
    lengths = [
        n
        for n in range(1, len(ids))
        if len({tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)}) < len(ids) - n + 1
    ]
    assert longest_repeat(ids) == (max(lengths, default=0) if ids else None)


@given(few.filter(lambda ids: len(ids) >= 4))
def test_repetition_is_positive_exactly_where_distinct_is_below_one(ids):
    assert (repeated(ids, 4) > 0) == (distinct(ids, 4) < 1)
    assert (longest_repeat(ids) >= 4) == (distinct(ids, 4) < 1)


def test_samples_too_short_for_an_ngram_are_excluded_from_its_mean_and_its_count():
    found = diversity_of([[1, 2, 3, 4], [1], []])
    assert [found.distinct[n].num for n in (1, 2, 3, 4)] == [2, 1, 1, 1]
    assert found.repeated.num == 1
    assert (found.tokens.least, found.tokens.median, found.tokens.most) == (0, 1, 4)
    assert found.tokens.mean.num == 3
