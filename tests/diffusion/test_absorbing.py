"""The reverse step of beliefs that may put mass on the mask, by enumeration."""

import itertools

import pytest
import torch
from worlds import World, real, seeded

from adlm.diffusion.masking import absorbing_divergence, absorbing_posterior, posterior
from adlm.diffusion.schedules import LogLinear
from adlm.diffusion.times import grid

STEPS = [(0.3, 0.1), (0.9, 0.2), (1.0, 0.6), (0.5, 0.0), (1.0, 0.0)]
every_step = pytest.mark.parametrize(("alpha_s", "alpha_t"), [[real(a) for a in s] for s in STEPS])


def beliefs_with_mask(world: World, seed: int = 0) -> torch.Tensor:
    """Beliefs over all symbols, the mask too, at every state, (S, L, V); a visible token is not copied."""
    guess = torch.rand(*world.states.shape, world.num_symbols, generator=seeded(seed), dtype=torch.float64) + 0.02
    return guess / guess.sum(dim=-1, keepdim=True)


@every_step
def test_it_is_bayes_rule_with_beliefs_for_the_clean_token(alpha_s, alpha_t):
    """p(z_s | m) is proportional to q(m | z_s) q(z_s | x_theta), one token."""
    beliefs = real([0.2, 0.5, 0.3])  # the mask is the last
    prior = torch.cat([alpha_s * beliefs[:2], (1 - alpha_s + alpha_s * beliefs[2])[None]])
    likelihood = torch.stack([1 - alpha_t / alpha_s] * 2 + [torch.ones_like(alpha_s)])
    expected = prior * likelihood / (prior * likelihood).sum()
    ours = absorbing_posterior(torch.tensor([[2]]), beliefs[None, None], alpha_s, alpha_t, mask_id=2)[0, 0]
    torch.testing.assert_close(ours, expected)


@every_step
def test_without_belief_in_the_mask_it_is_the_subs_step(alpha_s, alpha_t):
    world = World.random()
    beliefs = world.random_beliefs()
    ours = absorbing_posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id)
    torch.testing.assert_close(ours, posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id))


@every_step
def test_the_divergence_is_that_of_the_two_steps(alpha_s, alpha_t):
    world = World.random()
    beliefs, x = beliefs_with_mask(world), torch.where(world.states == world.mask_id, 1, world.states)
    truth = torch.nn.functional.one_hot(x, world.num_symbols).double()
    right = posterior(world.states, truth, alpha_s, alpha_t, world.mask_id)
    model = absorbing_posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id)
    torch.testing.assert_close(model.sum(dim=-1), torch.ones(world.states.shape, dtype=torch.float64))
    divergence = torch.where(right > 0, right * (right / model).log(), 0.0).sum(dim=-1)
    log_right = beliefs.gather(-1, x[..., None])[..., 0].log()
    ours = absorbing_divergence(log_right, beliefs[..., world.mask_id].log(), alpha_s, alpha_t)
    masked = world.states == world.mask_id
    torch.testing.assert_close(ours[masked], divergence[masked])
    torch.testing.assert_close(divergence[~masked], torch.zeros_like(divergence[~masked]))


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_the_d3pm_bound_is_never_below_the_likelihood_of_its_chain(steps):
    """The divergences of T steps plus the reconstruction at t = 0, for a chain decoded by its beliefs."""
    world = World.random()
    alpha = LogLinear().alpha(grid(steps))
    beliefs = beliefs_with_mask(world)
    clean = torch.where(torch.arange(world.num_symbols) == world.mask_id, 0.0, beliefs)
    clean = clean / clean.sum(dim=-1, keepdim=True)
    blank = (world.states == world.mask_id).all(dim=1).double()
    x = world.texts[:, None].expand(-1, len(world.states), -1)
    log_right = beliefs[None].expand(len(x), -1, -1, -1).gather(-1, x[..., None])[..., 0].log()
    masked = world.states == world.mask_id
    state, bound = blank, torch.zeros(len(world.texts), dtype=torch.float64)
    for alpha_t, alpha_s in itertools.pairwise(alpha):
        each = absorbing_posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id)
        pairs = each[:, None].expand(-1, len(world.states), -1, -1)
        move = pairs.gather(-1, world.states[None, :, :, None].expand(len(world.states), -1, -1, 1))[..., 0].prod(-1)
        state = state @ move
        divergence = absorbing_divergence(log_right, beliefs[..., world.mask_id].log(), alpha_s, alpha_t)
        bound += (world.forward_probabilities(alpha_t) * (divergence * masked).sum(dim=-1)).sum(dim=1)
    bound += (
        world.forward_probabilities(alpha[-1])
        * -clean[None].expand(len(x), -1, -1, -1).gather(-1, x[..., None])[..., 0].log().sum(-1)
    ).sum(1)
    likelihood = state @ world.final_reveal(clean)
    torch.testing.assert_close(likelihood.sum(), torch.ones((), dtype=torch.float64))
    assert (bound + likelihood.log() > -1e-12).all()
