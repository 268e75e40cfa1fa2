"""The bounds, by enumeration: every text, every noisy state, every step.

The worlds here have two words, three tokens and a mask: 8 texts, 27 states.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor
from worlds import World, quadrature, real

from adlm.diffusion.masking import posterior, remasking_ceiling
from adlm.diffusion.objectives import (
    anchor_gamma,
    anchor_mask,
    anchor_weight,
    continuous_weight,
    discrete_weight,
    prior_nats,
)
from adlm.diffusion.schedules import Cosine, CosineSquared, Geometric, Linear, LogLinear, NoiseSchedule
from adlm.diffusion.times import grid

SCHEDULES = [LogLinear(), LogLinear(1e-3), Cosine(), CosineSquared(), Linear(0.0, 3.0), Geometric(1e-2, 2.0)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def alphas(schedule: NoiseSchedule, steps: int) -> Tensor:
    """alpha at 1, ..., 0."""
    return schedule.alpha(grid(steps))


def chain_likelihood(world: World, beliefs: Tensor, schedule: NoiseSchedule, steps: int, sigma: float) -> Tensor:
    """p(x) of the sampling chain for every text, (X,)."""
    alpha = alphas(schedule, steps)
    state = world.prior(alpha[0])
    for alpha_t, alpha_s in itertools.pairwise(alpha):
        remask = remasking_ceiling(alpha_s, alpha_t).clamp(max=sigma)
        state = state @ world.step(beliefs, alpha_s, alpha_t, remask)
    return state @ world.final_reveal(beliefs)


def discrete_bound(world: World, beliefs: Tensor, schedule: NoiseSchedule, steps: int, sigma: float = 0.0) -> Tensor:
    """The discrete-time NELBO in nats per text, both ends included, (X,)."""
    alpha, nats = alphas(schedule, steps), world.nats(beliefs)
    total = (world.forward_probabilities(alpha[-1]) * nats).sum(dim=1) + world.length * prior_nats(
        schedule, world.mask_id
    )
    for alpha_t, alpha_s in itertools.pairwise(alpha):
        weight = discrete_weight(alpha_s, alpha_t, steps, sigma) / steps
        total = total + weight * (world.forward_probabilities(alpha_t) * nats).sum(dim=1)
    return total


def continuous_bound(world: World, beliefs: Tensor, schedule: NoiseSchedule) -> Tensor:
    """The continuous-time NELBO in nats per text, both ends included, (X,)."""
    nats, total = world.nats(beliefs), torch.zeros(len(world.texts), dtype=torch.float64)
    for t, share in zip(*quadrature(200), strict=True):
        total += (
            share * continuous_weight(schedule, t) * (world.forward_probabilities(schedule.alpha(t)) * nats).sum(dim=1)
        )
    alpha_0 = schedule.alpha(torch.zeros((), dtype=torch.float64))
    total += (world.forward_probabilities(alpha_0) * nats).sum(dim=1)
    return total + world.length * prior_nats(schedule, world.mask_id)


@every_schedule
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("sigma", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("kind", ["random", "exact"])
def test_the_bound_is_never_below_the_true_negative_log_likelihood_of_the_chain(schedule, steps, sigma, kind):
    world = World.random()
    beliefs = world.random_beliefs() if kind == "random" else world.exact_beliefs()
    likelihood = chain_likelihood(world, beliefs, schedule, steps, sigma)
    torch.testing.assert_close(likelihood.sum(), torch.ones((), dtype=torch.float64))
    gap = discrete_bound(world, beliefs, schedule, steps, sigma) + likelihood.log()
    assert (gap > -1e-12).all()
    assert gap.max() > 1e-6 or steps == 1  # one step from all masks is exact: there is nothing to average over


def test_in_one_step_from_all_masks_the_bound_is_the_likelihood_of_independent_tokens():
    world = World.random()
    beliefs = world.random_beliefs()
    likelihood = chain_likelihood(world, beliefs, LogLinear(), 1, 0.0)
    torch.testing.assert_close(discrete_bound(world, beliefs, LogLinear(), 1), -likelihood.log())


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine(), CosineSquared()], ids=str)
def test_for_exact_beliefs_the_bound_converges_to_the_likelihood_of_the_language(schedule):
    world = World.random()
    beliefs, truth = world.exact_beliefs(), -world.probabilities.log()
    gaps = []
    for steps in (8, 32, 128, 512):
        bound = discrete_bound(world, beliefs, schedule, steps)
        chain = -chain_likelihood(world, beliefs, schedule, steps, 0.0).log()
        assert (bound - chain > -1e-12).all()
        gaps.append(torch.stack([bound - truth, chain - truth]).abs().max().item())
    assert all(later < 0.3 * earlier for earlier, later in itertools.pairwise(gaps))  # like 1/T
    assert gaps[-1] < 2e-3


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine(), CosineSquared()], ids=str)
def test_in_continuous_time_exact_beliefs_pay_the_likelihood_of_the_language_itself(schedule):
    world = World.random()
    bound = continuous_bound(world, world.exact_beliefs(), schedule)
    torch.testing.assert_close(bound, -world.probabilities.log(), rtol=0, atol=1e-9)


@every_schedule
def test_the_discrete_bound_converges_to_the_continuous_one(schedule):
    world = World.random()
    beliefs = world.random_beliefs()
    continuous = continuous_bound(world, beliefs, schedule)
    gaps = [(discrete_bound(world, beliefs, schedule, steps) - continuous).abs().max().item() for steps in (64, 1024)]
    assert gaps[1] < gaps[0] / 8
    assert gaps[1] < 0.02


@every_schedule
def test_uniform_beliefs_cost_log_v_with_both_ends_included(schedule):
    """Uniform beliefs over V words must cost log V; the integral alone leaves out the ends of the schedule."""
    world = World.random()
    uniform = torch.where((world.states == world.mask_id)[..., None], 1 / world.mask_id, world.random_beliefs())
    uniform[..., world.mask_id] = 0
    paid = continuous_bound(world, uniform, schedule)
    torch.testing.assert_close(paid, torch.full_like(paid, world.length * math.log(world.mask_id)))
    left_out = world.length * prior_nats(schedule, world.mask_id)
    ends_masked = schedule.alpha(torch.ones((), dtype=torch.float64)) < 1e-12
    assert (left_out < 1e-12) == bool(ends_masked)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_theorem_4_1_each_weight_is_the_divergence_of_a_transition_at_masked_anchors(sigma):
    """[ADLM Theorem 4.1]: the ANELBO sums KL(q(z_s | z_t, x) || transition) of the denoiser and, times gamma, of the
    anchor transition at anchors. At a masked token that is weight * -log p; at a visible one it is 0."""
    world = World.random()
    alpha_s, alpha_t = real(0.5), real(0.3)
    beliefs = world.random_beliefs(seed=3)
    masked = world.states == world.mask_id
    anchors = torch.rand(world.states.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    weight = discrete_weight(alpha_s, alpha_t, steps=1, remask=sigma)
    x = torch.where(masked, 1, world.states)
    truth = torch.nn.functional.one_hot(x, world.num_symbols).double()
    remask = remasking_ceiling(alpha_s, alpha_t).clamp(max=sigma)
    right = posterior(world.states, truth, alpha_s, alpha_t, world.mask_id, remask)
    model = posterior(world.states, beliefs, alpha_s, alpha_t, world.mask_id, remask)
    divergence = torch.where(right > 0, right * (right / model).log(), 0.0).sum(dim=-1)
    nats = -beliefs.gather(-1, x[..., None])[..., 0].log()
    ours = anchor_weight(weight, anchors, masked, "masked") * nats
    torch.testing.assert_close(ours, divergence * anchors)
    everywhere = anchor_weight(weight, anchors, masked, "all")
    assert ((everywhere > 0) == anchors).all()


def anelbo(world: World, denoiser: Tensor, anchor_network: Tensor, gamma: float, steps: int, positions: str) -> Tensor:
    """The discrete-time ANELBO in nats per text, (X,); the anchors of a text are the words that occur once in it."""
    alpha = alphas(LogLinear(), steps)
    masked = (world.states == world.mask_id)[None].expand(len(world.texts), -1, -1)
    anchors = anchor_mask(world.texts, 1, world.num_symbols)[:, None].expand_as(masked)
    x = world.texts[:, None, :, None].expand(-1, len(world.states), -1, 1)
    nats, anchor_nats = (
        -beliefs[None].expand(len(x), -1, -1, -1).gather(-1, x)[..., 0].clamp(min=1e-300).log()
        for beliefs in (denoiser, anchor_network)
    )
    total = torch.zeros(len(world.texts), dtype=torch.float64)
    for alpha_t, alpha_s in itertools.pairwise(alpha):
        weight = discrete_weight(alpha_s, alpha_t, steps) / steps
        at_anchors = anchor_weight(weight, anchors, masked, positions)
        nats_at = (weight * masked * nats + gamma * at_anchors * anchor_nats).sum(dim=-1)
        total += (world.forward_probabilities(alpha_t) * nats_at).sum(dim=1)
    return total


@pytest.mark.parametrize("gamma", [0.0, 3e-3, 0.5])
def test_theorem_4_1_the_anelbo_with_masked_anchors_bounds_the_likelihood(gamma):
    """The NELBO of the denoiser plus gamma times the anchor network's cross-entropy at masked anchors."""
    world, steps = World.random(), 5
    denoiser, anchor_network = world.random_beliefs(seed=1), world.random_beliefs(seed=2)
    bound = anelbo(world, denoiser, anchor_network, gamma, steps, "masked")
    true = -chain_likelihood(world, denoiser, LogLinear(), steps, 0.0).log()
    assert (bound - true > -1e-12).all()
    nelbo = discrete_bound(world, denoiser, LogLinear(), steps)
    torch.testing.assert_close(anelbo(world, denoiser, anchor_network, 0.0, steps, "masked"), nelbo)
    has_anchors = anchor_mask(world.texts, 1, world.num_symbols).any(dim=1)
    assert ((bound - nelbo > 1e-9) == (has_anchors & (gamma > 0))).all()


def test_without_the_prior_term_a_text_can_cost_less_than_its_likelihood():
    """Why `prior_nats` is there: for a schedule that ends visible the integral alone is below -log p(x)."""
    world, schedule = World.random(), LogLinear(0.5)
    beliefs = world.exact_beliefs()
    bound = discrete_bound(world, beliefs, schedule, 4)
    true = -chain_likelihood(world, beliefs, schedule, 4, 0.0).log()
    assert (bound - true > -1e-12).all()
    assert (bound - world.length * prior_nats(schedule, world.mask_id) - true < 0).any()


def test_the_discrete_weight_of_the_log_linear_schedule_is_one_over_t():
    t = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    schedule = LogLinear()
    weight = discrete_weight(schedule.alpha(t - 0.1), schedule.alpha(t), steps=10)
    torch.testing.assert_close(weight, 1 / t)


def test_remasking_adds_sigma_alpha_over_the_masked_share_to_each_weight_up_to_the_ceiling():
    alpha_s, alpha_t = real(0.6), real(0.5)
    plain = discrete_weight(alpha_s, alpha_t, 1)
    torch.testing.assert_close(discrete_weight(alpha_s, alpha_t, 1, 0.1) - plain, real(0.1 * 0.5 / 0.5))
    torch.testing.assert_close(discrete_weight(alpha_s, alpha_t, 1, 1.0), torch.ones((), dtype=torch.float64))


def test_gamma_warms_up_with_progress_and_then_stays():
    assert [anchor_gamma(3e-3, progress) for progress in (0.0, 1e-3, 3e-3, 0.5, 1.0)] == [0, 1e-3, 3e-3, 3e-3, 3e-3]
    assert anchor_gamma(3e-3, 0.0, warm_up=False) == 3e-3


def test_there_is_no_anchor_term_with_gamma_0_or_after_its_end():
    assert anchor_gamma(0.0, 0.5) is None
    assert [anchor_gamma(0.1, progress, until=0.3) for progress in (0.2, 0.3, 0.31, 1)] == [0.1, 0.1, None, None]
