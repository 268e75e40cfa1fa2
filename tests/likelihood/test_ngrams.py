"""Unigram and bigram cross-entropies against a plain implementation, token by token."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from adlm.likelihood.ngrams import ngram_nats


def without_padding(x):
    return x, np.ones_like(x, bool)


def plainly(train, held_out, num_symbols):
    """The same, token by token."""
    words = Counter(int(word) for row in train for word in row)
    total = sum(words.values()) + num_symbols
    pairs = Counter((int(a), int(b)) for row in train for a, b in pairwise(row))
    after: dict[int, set[int]] = {}
    for a, b in pairs:
        after.setdefault(a, set()).add(b)
    unigram = bigram = count = 0.0
    for row in held_out:
        for position, word in enumerate(map(int, row)):
            chance = (words[word] + 1) / total
            unigram -= math.log(chance)
            before = int(row[position - 1])
            kinds = len(after.get(before, ())) if position else 0
            seen = sum(pairs[before, b] for b in after.get(before, ())) if position else 0
            mixed = (pairs[before, word] + kinds * chance) / (seen + kinds) if kinds else chance
            bigram -= math.log(mixed)
            count += 1
    return unigram / count, bigram / count


@pytest.mark.parametrize("seed", range(4))
def test_cross_entropies_equal_the_plain_implementation(seed):
    draws = np.random.default_rng(seed)
    train, held_out = draws.integers(0, 9, (20, 7)), draws.integers(0, 10, (6, 7))
    found = ngram_nats([without_padding(train[:8]), without_padding(train[8:])], [without_padding(held_out)], 10)
    unigram, bigram = plainly(train, held_out, 10)
    assert found.unigram == pytest.approx(unigram)
    assert found.bigram == pytest.approx(bigram)


def test_padding_is_not_counted():
    x = np.array([[1, 2, 1, 2, 0, 0]])
    text = np.array([[True] * 4 + [False] * 2])
    with_pad = ngram_nats([(x, text)], [(x, text)], 5)
    without = ngram_nats([without_padding(x[:, :4])], [without_padding(x[:, :4])], 5)
    assert with_pad == without


def test_bos_and_eos_are_context_but_not_scored():
    """[bos] a b [eos]: a is predicted from bos, and only the nats of a and b are summed."""
    x = np.tile([3, 1, 2, 4], (40, 1))
    text = np.tile([False, True, True, False], (40, 1))
    found = ngram_nats([(x, text)], [(x, text)], 5)
    assert found.unigram == pytest.approx(-math.log(41 / 85))
    assert found.bigram == pytest.approx(-math.log((40 + 41 / 85) / 41))


def test_a_bigram_model_learns_deterministic_pairs():
    x = np.tile([1, 2, 3, 4], (50, 10))
    found = ngram_nats([without_padding(x)], [without_padding(x)], 5)
    assert found.unigram == pytest.approx(math.log(4), abs=0.01)
    assert found.bigram < 0.1
