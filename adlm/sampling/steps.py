"""The steps of each sampler: how likely a masked token is revealed, and a visible one masked again. Knows no tokens.

For these samplers neither chance depends on what the network believes, so where a walk changes can be drawn before any
network is called; `plan.py` does.

Shapes: K steps; T is the number asked for, and dfm may need more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.diffusion.masking import remasking_ceiling, reveal_chance
from adlm.diffusion.schedules import Schedule
from adlm.diffusion.times import grid


@dataclass(frozen=True)
class Steps:
    """K steps from t = 1 to t_end, all in double precision."""

    t: Tensor
    """(K + 1,), the times between which they lie."""
    alpha_t: Tensor
    """(K,), the share of visible tokens before each step."""
    alpha_s: Tensor
    """(K,), the share after it."""
    reveal: Tensor
    """(K,), P(a masked token is revealed)."""
    remask: Tensor
    """(K,), P(a visible token that was drawn is masked again)."""

    @cached_property
    def told(self) -> Tensor:
        """(K + 1,), the share of visible tokens a network is told at each step, and for what is masked after them."""
        return torch.cat([self.alpha_t, self.alpha_s[-1:]])

    @cached_property
    def reached(self) -> Tensor:
        """(K + 1,), the time that each step ends at; what is masked after them is revealed at the same time."""
        return torch.cat([self.t[1:], self.t[-1:]])


Sigma = Callable[[Tensor, Tensor, float], Tensor]
"""(alpha_s, alpha_t, eta) -> how likely a visible token is masked again."""

SIGMA: dict[str, Sigma] = {
    "ancestral": lambda alpha_s, alpha_t, eta: torch.zeros_like(alpha_t),
    "remdm-cap": lambda alpha_s, alpha_t, eta: remasking_ceiling(alpha_s, alpha_t).clamp(max=eta),
    "remdm-rescale": lambda alpha_s, alpha_t, eta: eta * remasking_ceiling(alpha_s, alpha_t),
    "forward-backward": lambda alpha_s, alpha_t, eta: torch.where(
        alpha_t > 0, (alpha_s - alpha_t) / alpha_t, 1.0
    ).clamp(max=1),
}


def steps_of(schedule: Schedule, sampling: Sampling) -> Steps:
    """The steps of a sampler whose chances are known beforehand; those that are not take its ancestral ones."""
    if sampling.sampler == "dfm":
        return corrector_steps(schedule, sampling.steps)
    return steps_between(schedule, grid(sampling.steps, sampling.t_end), sampling)


def steps_between(schedule: Schedule, t: Tensor, sampling: Sampling) -> Steps:
    """The same on a grid of one's own."""
    if sampling.sampler == "remdm-loop":
        return loop_steps(schedule, t, sampling.strength, sampling.t_on, sampling.t_off, sampling.alpha_on)
    alpha = schedule.alpha(t)
    sigma = SIGMA.get(sampling.sampler, SIGMA["ancestral"])(alpha[1:], alpha[:-1], sampling.strength)
    return _steps(t, alpha[:-1], alpha[1:], sigma)


def loop_steps(schedule: Schedule, t: Tensor, eta: float, t_on: float, t_off: float, alpha_on: float) -> Steps:
    """ReMDM's loop: ancestral until a share alpha_on is visible, remasking at that share, ancestral to the end.

    Which part a step belongs to is decided by where it begins, as published.
    """
    start, end = t[:-1], t[1:]
    before, after = start > t_on, start <= t_off

    def alpha(time: Tensor) -> Tensor:
        rising = schedule.alpha(time) * alpha_on / schedule.alpha(torch.tensor(t_on, dtype=time.dtype))
        hidden = schedule.mask_chance(time) / schedule.mask_chance(torch.tensor(t_off, dtype=time.dtype))
        return torch.where(before, rising, torch.where(after, 1 - hidden * (1 - alpha_on), alpha_on))

    sigma = torch.where(before | after, 0.0, eta).to(t)
    return _steps(t, alpha(start), alpha(end), sigma)


def corrector_steps(schedule: Schedule, num: int) -> Steps:
    """Discrete flow matching with a corrector: reveal a times as fast as needed, and mask again what is too much.

    a = 10 t^.25 (1 - t)^.25 + 1, b = a - 1; a step is 1/T or shorter where the two chances would together pass 1, so
    there may be more than T. The first is ancestral. It stops at t <= (1 - 1e-5) / T.
    """
    times: list[float] = [1.0]
    speeds: list[float] = []
    while times[-1] > (1 - 1e-5) / num:
        t = times[-1]
        speed = 1.0 if t == 1 else 10 * t**0.25 * (1 - t) ** 0.25 + 1
        longest = 1 / num if t == 1 else 1 / (speed / t + (speed - 1) / (1 - t))
        speeds.append(speed)
        times.append(t - min(1 / num, longest))
    grid_times, forth = torch.tensor(times, dtype=torch.float64), torch.tensor(speeds, dtype=torch.float64)
    alpha = schedule.alpha(grid_times)
    alpha_t, alpha_s = alpha[:-1], alpha[1:]
    back = torch.where(alpha_t > 0, (forth - 1) * (alpha_s / alpha_t - 1), 0.0)
    reveal = forth * (alpha_s - alpha_t) / (1 - alpha_t)
    return Steps(grid_times, alpha_t, alpha_s, reveal.clamp(0, 1), back.clamp(0, 1))


def _steps(t: Tensor, alpha_t: Tensor, alpha_s: Tensor, sigma: Tensor) -> Steps:
    """A chance above 1 leaves the other outcome negative mass: clipped and normalised, as published, that is 1."""
    reveal = reveal_chance(alpha_s, alpha_t, sigma)
    return Steps(t, alpha_t, alpha_s, reveal.clamp(0, 1), sigma.clamp(0, 1))
