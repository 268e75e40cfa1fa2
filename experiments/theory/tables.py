"""Proposition 4.4 with tables: how many samples AR, a DLM and an anchored model need to learn a language on a DAG.

A language has L tokens of K words; token l depends on at most d earlier ones, its anchors. Three models fit tables:

- AR: p(x_l | all earlier tokens), K^(place-1) contexts each;
- DLM: p(x_l | z) for every noisy state z, trained as diffusion models are, one random masking a text;
- anchored: p(x_l | its anchors), K^d contexts each.

Counts are smoothed by 1/2. The error is exact: the excess of the model's expected nats a text (for the DLM, of its
bound) over the entropy of the language, by enumeration. Where every context has been seen often, a table of m contexts
costs m (K - 1) / 2n nats, which gives each model its line.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Language:
    """A random DAG over L tokens of K words, with a table for each token given its anchors."""

    words: int
    anchors: tuple[tuple[int, ...], ...]
    tables: tuple[Numbers, ...]
    """Token l: (K, ..., K, K), its anchors' words first, its own last."""

    @property
    def length(self) -> int:
        return len(self.anchors)

    def texts(self) -> Ids:
        return np.array(list(itertools.product(range(self.words), repeat=self.length)))

    def probabilities(self) -> Numbers:
        """Of every text, (K^L,)."""
        texts = self.texts()
        return np.prod(
            [self.tables[place][(*texts[:, self.anchors[place]].T, texts[:, place])] for place in range(self.length)],
            axis=0,
        )


def random_language(words: int, length: int, parents: int, draws: np.random.Generator) -> Language:
    """Each token depends on `parents` earlier ones, or on all there are."""
    anchors = tuple(
        tuple(int(a) for a in sorted(draws.choice(place, size=min(place, parents), replace=False)))
        for place in range(length)
    )
    tables = tuple(draws.dirichlet(np.ones(words), size=(words,) * len(a)) for a in anchors)
    return Language(words, anchors, tables)


def smoothed(counts: Numbers) -> Numbers:
    return (counts + 0.5) / (counts + 0.5).sum(axis=-1, keepdims=True)


def counted(shape: tuple[int, ...], rows: Ids) -> Numbers:
    """How often each index of a table occurs among the rows."""
    flat = np.ravel_multi_index(tuple(rows.T), shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape).astype(float)


def fit_on(language: Language, contexts: tuple[tuple[int, ...], ...], samples: Ids) -> list[Numbers]:
    """A smoothed table of every token given the tokens of its context."""
    tables = []
    for place, context in enumerate(contexts):
        tables.append(smoothed(counted((language.words,) * (len(context) + 1), samples[:, (*context, place)])))
    return tables


def excess(language: Language, contexts: tuple[tuple[int, ...], ...], tables: list[Numbers]) -> float:
    """KL(language || model) in nats a text."""
    texts, chance = language.texts(), language.probabilities()
    log_model = sum(
        np.log(table[(*texts[:, context].T, texts[:, place])])
        for place, (context, table) in enumerate(zip(contexts, tables, strict=True))
    )
    seen = chance > 0
    return float((chance[seen] * (np.log(chance[seen]) - np.asarray(log_model)[seen])).sum())


def states_of(ids: Ids, masked: NDArray[np.bool_], words: int) -> Ids:
    """The noisy state of each row as one number in base K + 1; the mask is the digit K."""
    digits = np.where(masked, words, ids)
    return np.asarray((digits * (words + 1) ** np.arange(ids.shape[1])[::-1]).sum(axis=1))


def fit_dlm(language: Language, samples: Ids, draws: np.random.Generator) -> Numbers:
    """((K+1)^L, L, K): beliefs at every noisy state, from one masking a text at a uniform time."""
    words, length = language.words, language.length
    masked = draws.random(samples.shape) < draws.random((len(samples), 1))
    states = states_of(samples, masked, words)
    rows, places = np.nonzero(masked)
    seen = np.stack([states[rows], places, samples[rows, places]], axis=1)
    return smoothed(counted(((words + 1) ** length, length, words), seen))


def excess_dlm(language: Language, beliefs: Numbers) -> float:
    """The excess of the continuous-time bound: over all sets of visible tokens, as if every order were as likely."""
    texts, chance, length = language.texts(), language.probabilities(), language.length
    total = np.zeros(len(texts))
    for pattern in itertools.product((False, True), repeat=length):
        masked = np.array(pattern)
        if not masked.any():
            continue
        visible = length - int(masked.sum())
        # the integral over t of t^(m-1) (1-t)^v: how often this set of m masks is met, with the weight 1/t
        share = 1 / (length * np.exp(log_choose(length - 1, visible)))
        states = states_of(texts, np.broadcast_to(masked, texts.shape), language.words)
        for place in np.nonzero(masked)[0]:
            total -= share * np.log(beliefs[states, place, texts[:, place]])
    seen = chance > 0
    return float((chance[seen] * (total[seen] + np.log(chance[seen]))).sum())


def log_choose(n: int, k: int) -> float:
    return float(sum(np.log(n - i) - np.log(i + 1) for i in range(k)))


def num_entries(language: Language) -> dict[str, int]:
    """How many numbers each model's tables hold."""
    words, length = language.words, language.length
    return {
        "AR": sum(words ** (place + 1) for place in range(length)),
        "DLM": length * words * (words + 1) ** (length - 1),
        "anchored": sum(words ** (len(a) + 1) for a in language.anchors),
    }


def predicted(language: Language) -> dict[str, float]:
    """n times the error for large n: (K - 1)/2 for every context, and for the DLM as often as a masking meets it."""
    words, length = language.words, language.length
    half = (words - 1) / 2
    return {
        "AR": half * sum(words**place for place in range(length)),
        "DLM": half * (length + 1) * ((words + 1) ** length - words**length),
        "anchored": half * sum(words ** len(a) for a in language.anchors),
    }


def errors(language: Language, num: int, draws: np.random.Generator) -> dict[str, float]:
    """The held-out error of the three models after `num` texts."""
    chance = language.probabilities()
    samples = language.texts()[draws.choice(len(chance), size=num, p=chance / chance.sum())]
    past = tuple(tuple(range(place)) for place in range(language.length))
    return {
        "AR": excess(language, past, fit_on(language, past, samples)),
        "DLM": excess_dlm(language, fit_dlm(language, samples, draws)),
        "anchored": excess(language, language.anchors, fit_on(language, language.anchors, samples)),
    }
