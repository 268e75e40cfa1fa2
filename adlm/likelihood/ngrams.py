"""Baselines: cross-entropies of held-out rows under unigram and bigram models. No networks.

Shapes: n rows of L ids; `text` is True at the tokens of the text, which are counted, and False at padding and at the
bos and eos that frame a row. The first token of a row is predicted from the row's bos, or by its frequency where rows
have none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RowBatches = Iterable[tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""(ids, text) batch by batch."""


@dataclass(frozen=True)
class Ngrams:
    """Nats per token."""

    unigram: float
    bigram: float


def ngram_nats(train: RowBatches, held_out: RowBatches, num_symbols: int) -> Ngrams:
    """Cross-entropies of the held-out rows under models counted on the training rows.

    Unigram with add-one smoothing. Bigram with Witten-Bell smoothing [1991]:
    p(w | v) = (c(vw) + T(v) p(w)) / (c(v) + T(v)), where T(v) is the number of distinct tokens seen after v.
    """
    counts = np.ones(num_symbols, np.float64)
    pairs: dict[int, int] = {}
    for x, text in train:
        counts += np.bincount(x[text], minlength=num_symbols)
        keys, times = np.unique(_bigram_keys(x, text, num_symbols), return_counts=True)
        for key, time in zip(keys.tolist(), times.tolist(), strict=True):
            pairs[key] = pairs.get(key, 0) + time
    unigram_probs = counts / counts.sum()
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
        unigram -= float(np.log(unigram_probs[x[text]]).sum())
        bigram -= float(np.log(unigram_probs[x[:, 0][text[:, 0]]]).sum())
        bigrams = _bigram_keys(x, text, num_symbols)
        index = np.minimum(np.searchsorted(keys, bigrams), len(keys) - 1)
        seen = np.where(keys[index] == bigrams, times[index], 0.0)
        before, after = bigrams // num_symbols, bigrams % num_symbols
        total = followed[before] + followers[before]
        mixed = np.where(
            total > 0, (seen + followers[before] * unigram_probs[after]) / np.maximum(total, 1), unigram_probs[after]
        )
        bigram -= float(np.log(mixed).sum())
    return Ngrams(unigram / num_tokens, bigram / num_tokens)


def _bigram_keys(x: NDArray[np.int64], text: NDArray[np.bool_], num_symbols: int) -> NDArray[np.int64]:
    """previous id * num_symbols + id, for every token of the text that has a predecessor in its row."""
    predicted = text[:, 1:]
    return x[:, :-1][predicted] * num_symbols + x[:, 1:][predicted]
