"""Appendix A.3.3 on a toy: with the anchor as a latent variable, training the pair is EM: the likelihood never falls.

The anchor network is a table p(y | z) over noisy states z, the denoiser a table p(x_l | y) for every token given the
anchor alone, as ADLM's denoiser reads nothing but the anchor network. For a text x and its noisy state z:

    log p(x | z) >= E_q [log p(y | z) + log p(x | y)] + entropy of q,    q a distribution over y.

The E-step takes q = p(y | x, z), where the bound meets the likelihood; the M-step refits both tables to q, which can
only raise the bound. So the likelihood rises with every round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tables import Ids, Language, Numbers, states_of


@dataclass(frozen=True)
class Pairs:
    """Every text with every noisy state of it, and how often they are met."""

    x: Ids
    state: Ids
    weight: Numbers


@dataclass(frozen=True)
class Round:
    """One round of EM: the likelihood before it, and the bound at its three points."""

    log_likelihood: float
    bound_after_e: float
    bound_after_m: float


def every_pair(language: Language) -> Pairs:
    texts, chance, length = language.texts(), language.probabilities(), language.length
    x, states, weights = [], [], []
    for number in range(2**length):
        masked = np.broadcast_to(np.array([number >> place & 1 for place in range(length)], dtype=bool), texts.shape)
        x.append(texts)
        states.append(states_of(texts, masked, language.words))
        weights.append(chance / 2**length)
    return Pairs(np.concatenate(x), np.concatenate(states), np.concatenate(weights))


def em(language: Language, num_anchors: int, rounds: int, draws: np.random.Generator) -> Iterator[Round]:
    """EM from random tables, on the language itself."""
    pairs, words = every_pair(language), language.words
    anchor_table = draws.dirichlet(np.ones(num_anchors), size=(words + 1) ** language.length)
    denoiser = draws.dirichlet(np.ones(words), size=(num_anchors, language.length))
    for _ in range(rounds):
        joint = log_joint(pairs, anchor_table, denoiser)
        evidence = np.logaddexp.reduce(joint, axis=1)
        q = np.exp(joint - evidence[:, None])
        after_e = bound(pairs, q, joint)
        anchor_table, denoiser = refit(pairs, q, anchor_table, words)
        after_m = bound(pairs, q, log_joint(pairs, anchor_table, denoiser))
        yield Round(float(pairs.weight @ evidence), after_e, after_m)


def log_joint(pairs: Pairs, anchor_table: Numbers, denoiser: Numbers) -> Numbers:
    """log p(y | z) + log p(x | y) of every pair and anchor."""
    tokens = [np.log(denoiser[:, place, pairs.x[:, place]]).T for place in range(pairs.x.shape[1])]
    with np.errstate(divide="ignore"):  # an anchor that a state has ruled out
        return np.log(anchor_table[pairs.state]) + np.sum(tokens, axis=0)


def bound(pairs: Pairs, q: Numbers, joint: Numbers) -> float:
    possible = q > 0
    gain = np.zeros_like(q)
    gain[possible] = q[possible] * (joint[possible] - np.log(q[possible]))
    return float(pairs.weight @ gain.sum(axis=1))


def refit(pairs: Pairs, q: Numbers, anchor_table: Numbers, words: int) -> tuple[Numbers, Numbers]:
    """The tables that q makes likeliest."""
    mass = pairs.weight[:, None] * q
    by_state = np.zeros_like(anchor_table)
    np.add.at(by_state, pairs.state, mass)
    met = by_state.sum(axis=1, keepdims=True) > 0
    anchors = np.where(met, by_state, 1.0)
    tokens = np.zeros((q.shape[1], pairs.x.shape[1], words))
    for place in range(pairs.x.shape[1]):
        np.add.at(tokens[:, place].T, pairs.x[:, place], mass)
    return anchors / anchors.sum(axis=1, keepdims=True), tokens / tokens.sum(axis=2, keepdims=True)
