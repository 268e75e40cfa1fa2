"""The steps of each sampler: the probabilities of revealing a masked token and of remasking a visible one.

Neither depends on the network's output, so events.py draws the positions that change before any network call.

Shapes: K steps; K = sampling.steps except for dfm, which may need more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.diffusion.masking import remasking_ceiling, reveal_chance
from adlm.diffusion.schedules import NoiseSchedule


@dataclass(frozen=True)
class Steps:
    """K steps from t = 1 to t_end, all in double precision."""

    t: Tensor
    """(K + 1,), the times that bound the steps, falling."""
    alpha_t: Tensor
    """(K,), the share of visible tokens before each step."""
    alpha_s: Tensor
    """(K,), the share after it."""
    reveal: Tensor
    """(K,), P(a masked token is revealed)."""
    remask: Tensor
    """(K,), P(a visible token that was drawn is remasked)."""

    @cached_property
    def conditioning_alpha(self) -> Tensor:
        """(K + 1,), alpha for time-conditioned networks at each step and for the final reveal after the last."""
        return torch.cat([self.alpha_t, self.alpha_s[-1:]])

    @cached_property
    def end_time(self) -> Tensor:
        """(K + 1,), the time at which each step ends; the final reveal happens at the end of the last step."""
        return torch.cat([self.t[1:], self.t[-1:]])


StepsFunction = Callable[[NoiseSchedule, Tensor, Sampling], Steps]
"""(schedule, time grid (K + 1,), options) -> the steps of a sampler."""


def ancestral_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """No token is remasked."""
    return _remasking_steps(schedule, t, lambda alpha_s, alpha_t: torch.zeros_like(alpha_t))


def cap_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """remask = min(eta, ceiling).  [ReMDM]"""
    eta = sampling.strength
    return _remasking_steps(schedule, t, lambda alpha_s, alpha_t: remasking_ceiling(alpha_s, alpha_t).clamp(max=eta))


def rescale_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """remask = eta * ceiling.  [ReMDM]"""
    return _remasking_steps(
        schedule, t, lambda alpha_s, alpha_t: sampling.strength * remasking_ceiling(alpha_s, alpha_t)
    )


def forward_backward_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """remask = (alpha_s - alpha_t) / alpha_t, at most 1."""
    return _remasking_steps(
        schedule,
        t,
        lambda alpha_s, alpha_t: torch.where(alpha_t > 0, (alpha_s - alpha_t) / alpha_t, 1.0).clamp(max=1),
    )


def loop_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """ReMDM's loop: ancestral until a share alpha_on is visible, remasking at that share, then ancestral to the end.

    The time at which a step begins decides which part it belongs to, as published.
    """
    t_on, t_off, alpha_on = sampling.t_on, sampling.t_off, sampling.alpha_on
    start, end = t[:-1], t[1:]
    before, after = start > t_on, start <= t_off

    def alpha(time: Tensor) -> Tensor:
        rising = schedule.alpha(time) * alpha_on / schedule.alpha(torch.tensor(t_on, dtype=time.dtype))
        masked = schedule.mask_chance(time) / schedule.mask_chance(torch.tensor(t_off, dtype=time.dtype))
        return torch.where(before, rising, torch.where(after, 1 - masked * (1 - alpha_on), alpha_on))

    remask = torch.where(before | after, 0.0, sampling.strength).to(t)
    return _steps(t, alpha(start), alpha(end), remask)


def corrector_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """Discrete flow matching with a corrector: reveal a times as fast as ancestral, and remask the surplus.

    a = 10 t^.25 (1 - t)^.25 + 1, b = a - 1. A step has length 1/T, or less where the two probabilities would sum to
    more than 1, so there may be more than T steps. The first is ancestral. The last ends at t <= (1 - 1e-5) / T. The
    grid `t` is not used.
    """
    num = sampling.steps
    times: list[float] = [1.0]
    speeds: list[float] = []
    while times[-1] > (1 - 1e-5) / num:
        start = times[-1]
        speed = 1.0 if start == 1 else 10 * start**0.25 * (1 - start) ** 0.25 + 1
        longest = 1 / num if start == 1 else 1 / (speed / start + (speed - 1) / (1 - start))
        speeds.append(speed)
        times.append(start - min(1 / num, longest))
    grid_times, rate = torch.tensor(times, dtype=torch.float64), torch.tensor(speeds, dtype=torch.float64)
    alpha = schedule.alpha(grid_times)
    alpha_t, alpha_s = alpha[:-1], alpha[1:]
    remask = torch.where(alpha_t > 0, (rate - 1) * (alpha_s / alpha_t - 1), 0.0)
    reveal = rate * (alpha_s - alpha_t) / (1 - alpha_t)
    return Steps(grid_times, alpha_t, alpha_s, reveal.clamp(0, 1), remask.clamp(0, 1))


def _remasking_steps(schedule: NoiseSchedule, t: Tensor, remask: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """Steps with the remasking probability remask(alpha_s, alpha_t)."""
    alpha = schedule.alpha(t)
    return _steps(t, alpha[:-1], alpha[1:], remask(alpha[1:], alpha[:-1]))


def _steps(t: Tensor, alpha_t: Tensor, alpha_s: Tensor, remask: Tensor) -> Steps:
    """Probabilities above 1 become 1: the published code clips the other outcome's negative mass and normalises."""
    reveal = reveal_chance(alpha_s, alpha_t, remask)
    return Steps(t, alpha_t, alpha_s, reveal.clamp(0, 1), remask.clamp(0, 1))
