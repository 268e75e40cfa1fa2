"""Laws of counting: what unigrams and bigrams pay, against the plainest way to count."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from adlm.likelihood.ngrams import ngram_nats


def everything(x):
    return x, np.ones_like(x, bool)


def plainly(train, held_out, num_symbols):
    """The same, word by word."""
    words = Counter(int(word) for row in train for word in row)
    total = sum(words.values()) + num_symbols
    pairs = Counter((int(a), int(b)) for row in train for a, b in pairwise(row))
    after: dict[int, set[int]] = {}
    for a, b in pairs:
        after.setdefault(a, set()).add(b)
    unigram = bigram = count = 0.0
    for row in held_out:
        for place, word in enumerate(map(int, row)):
            chance = (words[word] + 1) / total
            unigram -= math.log(chance)
            before = int(row[place - 1])
            kinds = len(after.get(before, ())) if place else 0
            seen = sum(pairs[before, b] for b in after.get(before, ())) if place else 0
            mixed = (pairs[before, word] + kinds * chance) / (seen + kinds) if kinds else chance
            bigram -= math.log(mixed)
            count += 1
    return unigram / count, bigram / count


@pytest.mark.parametrize("seed", range(4))
def test_counts_pay_what_the_plain_count_pays(seed):
    draws = np.random.default_rng(seed)
    train, held_out = draws.integers(0, 9, (20, 7)), draws.integers(0, 10, (6, 7))
    found = ngram_nats([everything(train[:8]), everything(train[8:])], [everything(held_out)], 10)
    unigram, bigram = plainly(train, held_out, 10)
    assert found.unigram == pytest.approx(unigram)
    assert found.bigram == pytest.approx(bigram)


def test_padding_is_not_counted():
    x = np.array([[1, 2, 1, 2, 0, 0]])
    text = np.array([[True] * 4 + [False] * 2])
    with_pad = ngram_nats([(x, text)], [(x, text)], 5)
    without = ngram_nats([everything(x[:, :4])], [everything(x[:, :4])], 5)
    assert with_pad == without


def test_the_frame_of_a_row_is_context_and_neither_paid_for_nor_counted():
    """[bos] a b [eos]: a is predicted from bos, and the cost of a row is that of its two tokens."""
    x = np.tile([3, 1, 2, 4], (40, 1))
    text = np.tile([False, True, True, False], (40, 1))
    found = ngram_nats([(x, text)], [(x, text)], 5)
    assert found.unigram == pytest.approx(-math.log(41 / 85))
    assert found.bigram == pytest.approx(-math.log((40 + 41 / 85) / 41))


def test_a_bigram_learns_a_language_of_pairs():
    x = np.tile([1, 2, 3, 4], (50, 10))
    found = ngram_nats([everything(x)], [everything(x)], 5)
    assert found.unigram == pytest.approx(math.log(4), abs=0.01)
    assert found.bigram < 0.1
