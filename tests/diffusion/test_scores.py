"""Laws of scores and their entropy."""

import math

import pytest
import torch
from worlds import real, seeded

from adlm.diffusion.schedules import LogLinear, sigma, sigma_prime
from adlm.diffusion.scores import beliefs_to_scores, log_scores, score_entropy, scores_to_beliefs

MASK = 2


def some_beliefs() -> torch.Tensor:
    """Of three masked tokens over four words and a mask in their middle."""
    guess = torch.rand(3, 5, generator=seeded(), dtype=torch.float64)
    guess[:, MASK] = 0
    return guess / guess.sum(dim=-1, keepdim=True)


def entropy(scores: torch.Tensor, right: int, noise: torch.Tensor) -> torch.Tensor:
    clean = [0, 1, 3, 4]
    return score_entropy(scores[:, clean].sum(dim=-1).log(), scores[:, right].log(), noise)


def test_scores_and_beliefs_tell_the_same_story():
    beliefs, noise = some_beliefs(), real([0.1, 1.0, 4.0])
    scores = beliefs_to_scores(beliefs, noise, MASK)
    torch.testing.assert_close(scores_to_beliefs(scores, MASK), beliefs)
    assert (scores[:, MASK] == 1).all()
    # the ratio q(z with the word there) / q(z) = alpha p / (1 - alpha)
    alpha = torch.exp(-noise)[:, None]
    torch.testing.assert_close(scores[:, 0], (alpha * beliefs / (1 - alpha))[:, 0])


@pytest.mark.parametrize("right", [0, 3])
def test_the_entropy_of_scores_made_of_beliefs_is_the_weighted_cross_entropy(right):
    beliefs, t = some_beliefs(), real([0.2, 0.5, 0.9])
    schedule = LogLinear(1e-3)
    noise = sigma(schedule, t)
    nats = sigma_prime(schedule, t) * entropy(beliefs_to_scores(beliefs, noise, MASK), right, noise)
    torch.testing.assert_close(nats, -beliefs[:, right].log() / t)


def test_the_entropy_is_least_and_zero_where_the_right_word_has_the_right_ratio():
    noise = real([0.7])
    ratio = 1 / math.expm1(0.7)
    scores = torch.full((1, 5), 1e-12, dtype=torch.float64)
    scores[:, 3] = ratio
    assert entropy(scores, 3, noise).item() == pytest.approx(0, abs=1e-9)
    for factor in (0.5, 0.9, 1.1, 2.0):
        other = scores.clone()
        other[:, 3] *= factor
        assert entropy(other, 3, noise).item() > 1e-4
    elsewhere = scores.clone()
    elsewhere[:, 0] = 0.1
    assert entropy(elsewhere, 3, noise).item() == pytest.approx(0.1)


def test_a_network_of_zeros_has_scores_that_are_uniform_beliefs():
    noise = real([[0.3, 2.0]])
    z = torch.tensor([[MASK, 1]])
    scores = log_scores(torch.zeros(1, 2, 5, dtype=torch.float64), z, noise).exp()
    assert scores[0, 0, MASK] == 1
    assert scores[0, 1, 1] == 1
    torch.testing.assert_close(scores[0, 0, 0], torch.tensor(1 / (4 * math.expm1(0.3)), dtype=torch.float64))
