"""Scores and their entropy."""

import math

import pytest
import torch
from worlds import World, real, seeded

from adlm.diffusion.beliefs import log_scores, score_entropy, score_step
from adlm.diffusion.masking import posterior
from adlm.diffusion.schedules import LogLinear, sigma, sigma_prime

MASK = 2


def random_beliefs() -> torch.Tensor:
    """Beliefs (3, 5) of three masked tokens over four words, with the mask id in the middle."""
    guess = torch.rand(3, 5, generator=seeded(), dtype=torch.float64)
    guess[:, MASK] = 0
    return guess / guess.sum(dim=-1, keepdim=True)


def scores_to_beliefs(scores: torch.Tensor, mask_id: int) -> torch.Tensor:
    """Beliefs (N, V) from the scores (N, V) of masked tokens: normalised, without mass on the mask."""
    clean = scores.index_fill(-1, torch.tensor(mask_id, device=scores.device), 0.0)
    return clean / clean.sum(dim=-1, keepdim=True)


def beliefs_to_scores(beliefs: torch.Tensor, noise: torch.Tensor, mask_id: int) -> torch.Tensor:
    """The scores (N, V) of masked tokens that correspond to beliefs (N, V); 1 at the mask itself."""
    scores = beliefs / torch.expm1(noise)[..., None]
    return scores.index_fill(-1, torch.tensor(mask_id, device=scores.device), 1.0)


def entropy(scores: torch.Tensor, right: int, noise: torch.Tensor) -> torch.Tensor:
    clean = [0, 1, 3, 4]
    return score_entropy(scores[:, clean].sum(dim=-1).log(), scores[:, right].log(), noise)


def test_scores_and_beliefs_determine_each_other():
    beliefs, noise = random_beliefs(), real([0.1, 1.0, 4.0])
    scores = beliefs_to_scores(beliefs, noise, MASK)
    torch.testing.assert_close(scores_to_beliefs(scores, MASK), beliefs)
    assert (scores[:, MASK] == 1).all()
    # the ratio q(z with the word there) / q(z) = alpha p / (1 - alpha)
    alpha = torch.exp(-noise)[:, None]
    torch.testing.assert_close(scores[:, 0], (alpha * beliefs / (1 - alpha))[:, 0])


@pytest.mark.parametrize("right", [0, 3])
def test_the_entropy_of_scores_derived_from_beliefs_is_the_weighted_cross_entropy(right):
    beliefs, t = random_beliefs(), real([0.2, 0.5, 0.9])
    schedule = LogLinear(1e-3)
    noise = sigma(schedule, t)
    nats = sigma_prime(schedule, t) * entropy(beliefs_to_scores(beliefs, noise, MASK), right, noise)
    torch.testing.assert_close(nats, -beliefs[:, right].log() / t)


def test_the_entropy_is_minimal_and_zero_where_the_right_word_has_the_right_ratio():
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


def test_zero_logits_are_the_scores_of_uniform_beliefs():
    noise = real([[0.3, 2.0]])
    z = torch.tensor([[MASK, 1]])
    scores = log_scores(torch.zeros(1, 2, 5, dtype=torch.float64), z, noise).exp()
    assert scores[0, 0, MASK] == 1
    assert scores[0, 1, 1] == 1
    torch.testing.assert_close(scores[0, 0, 0], torch.tensor(1 / (4 * math.expm1(0.3)), dtype=torch.float64))


def test_the_analytic_step_of_scores_derived_from_beliefs_is_the_ancestral_step():
    world = World.random(words=2, length=2)
    beliefs = world.random_beliefs()
    alpha_s, alpha_t = real(0.6), real(0.4)
    sigma_s, sigma_t = -alpha_s.log(), -alpha_t.log()
    log_score = beliefs_to_scores(beliefs, sigma_t, world.mask_id).log()
    ours = score_step(world.states, log_score, sigma_s, sigma_t, world.mask_id)
    assert torch.allclose(ours, posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id))


def test_larger_scores_reveal_sooner_and_probabilities_are_never_negative():
    world = World.random(words=2, length=2)
    beliefs, sigma_s, sigma_t = world.random_beliefs(), real(0.5), real(1.0)
    log_score = beliefs_to_scores(beliefs, sigma_t, world.mask_id).log()
    masked = world.states == world.mask_id
    usual = score_step(world.states, log_score, sigma_s, sigma_t, world.mask_id)[masked][:, world.mask_id]
    sooner = score_step(world.states, log_score + 0.3, sigma_s, sigma_t, world.mask_id)[masked]
    assert (sooner[:, world.mask_id] < usual).all()
    at_once = score_step(world.states, log_score + 5, sigma_s, sigma_t, world.mask_id)[masked]
    assert (at_once[:, world.mask_id] == 0).all()
    assert torch.allclose(at_once.sum(dim=-1), real(1.0))
