"""Baselines by counting: cross-entropies of held-out rows under unigrams and bigrams. No networks.

Shapes: n rows of L ids; `text` is True at the tokens that count, which are the tokens of the text: neither padding nor
the bos and eos that frame a row. The first token of a row is predicted from the row's bos, or by its frequency where
rows have none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = Iterable[tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""(ids, text) of some rows at a time."""


@dataclass(frozen=True)
class Ngrams:
    """Nats a token."""

    unigram: float
    bigram: float


def ngram_nats(train: Rows, held_out: Rows, num_symbols: int) -> Ngrams:
    """Cross-entropies of the held-out rows by counts of the training rows.

    The unigram adds one to each count. The bigram p(w | v) mixes what followed v with the unigram, the more of the
    former the less often something new followed v: (c(vw) + T(v) p(w)) / (c(v) + T(v)), T(v) the number of different
    followers [Witten and Bell, 1991].
    """
    counts = np.ones(num_symbols, np.float64)
    pairs: dict[int, int] = {}
    for x, text in train:
        counts += np.bincount(x[text], minlength=num_symbols)
        keys, times = np.unique(_keys(x, text, num_symbols), return_counts=True)
        for key, time in zip(keys.tolist(), times.tolist(), strict=True):
            pairs[key] = pairs.get(key, 0) + time
    chance = counts / counts.sum()
    keys = np.fromiter(pairs, np.int64, len(pairs))
    times = np.fromiter(pairs.values(), np.float64, len(pairs))
    order = np.argsort(keys)
    keys, times = keys[order], times[order]
    followed = np.bincount(keys // num_symbols, times, num_symbols)
    followers = np.bincount(keys // num_symbols, minlength=num_symbols)
    unigram = bigram = 0.0
    num_tokens = 0
    for x, text in held_out:
        num_tokens += int(text.sum())
        unigram -= float(np.log(chance[x[text]]).sum())
        bigram -= float(np.log(chance[x[:, 0][text[:, 0]]]).sum())
        asked = _keys(x, text, num_symbols)
        place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        seen = np.where(keys[place] == asked, times[place], 0.0)
        before, after = asked // num_symbols, asked % num_symbols
        total = followed[before] + followers[before]
        mixed = np.where(total > 0, (seen + followers[before] * chance[after]) / np.maximum(total, 1), chance[after])
        bigram -= float(np.log(mixed).sum())
    return Ngrams(unigram / num_tokens, bigram / num_tokens)


def _keys(x: NDArray[np.int64], text: NDArray[np.bool_], num_symbols: int) -> NDArray[np.int64]:
    """(previous id, token) as one number, for every token of the text that has a predecessor in its row."""
    predicted = text[:, 1:]
    return x[:, :-1][predicted] * num_symbols + x[:, 1:][predicted]
