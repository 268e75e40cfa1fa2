"""Noise schedules."""

import math

import pytest
import torch
from worlds import quadrature

from adlm.diffusion import schedules
from adlm.diffusion.objectives import continuous_weight
from adlm.diffusion.schedules import Cosine, CosineSquared, Geometric, Linear, LogLinear

SCHEDULES = [
    LogLinear(),
    LogLinear(1e-3),
    Cosine(),
    Cosine(1e-2),
    CosineSquared(),
    CosineSquared(1e-2),
    Linear(0.0, 10.0),
    Linear(0.1, 3.0),
    Geometric(),
    Geometric(1e-3, 20.0),
]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


@every_schedule
def test_alpha_falls_from_its_start_to_its_end(schedule):
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    alpha = schedule.alpha(t)
    assert (alpha.diff() < 0).all()
    assert 0 <= alpha[-1] < alpha[0] <= 1


@every_schedule
def test_alpha_prime_is_the_slope_of_alpha(schedule):
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.alpha_prime(t), slope)


@every_schedule
def test_the_mask_chance_is_one_minus_alpha_and_precise_near_zero(schedule):
    t = torch.linspace(0, 1, 21, dtype=torch.float64)
    torch.testing.assert_close(schedule.mask_chance(t), 1 - schedule.alpha(t), rtol=1e-12, atol=1e-15)
    small = torch.tensor([1e-6, 1e-4], dtype=torch.float32)
    exact = schedule.mask_chance(small.double())
    torch.testing.assert_close(schedule.mask_chance(small).double(), exact, rtol=1e-5, atol=0)


@every_schedule
def test_sigma_is_minus_log_alpha_and_sigma_prime_its_slope(schedule):
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True)
    sigma = schedules.sigma(schedule, t)
    torch.testing.assert_close(sigma, -schedule.alpha(t).log())
    (slope,) = torch.autograd.grad(sigma.sum(), t)
    torch.testing.assert_close(schedules.sigma_prime(schedule, t), slope)


def test_sigma_is_precise_at_both_ends():
    ends = torch.tensor([1e-12, 1.0], dtype=torch.float64)
    found = schedules.sigma(Linear(0.0, 200.0), ends)
    torch.testing.assert_close(found, 200 * ends, rtol=1e-12, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_log_linear_weight_is_one_over_t_for_any_eps(eps):
    t = torch.tensor([1e-3, 0.1, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(continuous_weight(LogLinear(eps), t), 1 / t)


@every_schedule
def test_a_uniform_denoiser_pays_log_v_for_what_the_schedule_masks(schedule):
    """The integral of w(t) (1 - alpha_t) log V over (0, 1) is (alpha_0 - alpha_1) log V."""
    t, share = quadrature()
    cost = (share * continuous_weight(schedule, t) * schedule.mask_chance(t)).sum() * math.log(50_257)
    ends = schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(cost, (ends[0] - ends[1]) * math.log(50_257))


def test_the_published_schedules_mask_the_stated_shares():
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    masked = {str(s): float(s.alpha(ends)[0] - s.alpha(ends)[1]) for s in (LogLinear(), LogLinear(1e-3), Geometric())}
    assert [round(share, 3) for share in masked.values()] == [1.0, 0.999, 0.632]
