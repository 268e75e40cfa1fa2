"""Noise schedules: the probability alpha_t that a token is visible at time t. Does not depend on tokens.

Shapes: t is any tensor of times in [0, 1]; every function returns that shape.

A schedule gives alpha_t, its derivative, and 1 - alpha_t. The last has its own formula, because subtracting alpha_t
from 1 loses precision at small t. All that the bound needs follows from the three.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NoiseSchedule(Protocol):
    def alpha(self, t: Tensor) -> Tensor:
        """P(a token is visible at t), decreasing."""
        ...

    def alpha_prime(self, t: Tensor) -> Tensor:
        """d alpha_t / dt, negative."""
        ...

    def mask_chance(self, t: Tensor) -> Tensor:
        """P(a token is masked at t) = 1 - alpha_t, precise for small t."""
        ...


@dataclass(frozen=True)
class LogLinear:
    """alpha_t = 1 - (1 - eps) t, so the weight of the bound is 1/t for any eps."""

    eps: float = 0.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.mask_chance(t)

    def alpha_prime(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.eps - 1)

    def mask_chance(self, t: Tensor) -> Tensor:
        return (1 - self.eps) * t


@dataclass(frozen=True)
class Cosine:
    """alpha_t = eps + (1 - eps) cos(pi t / 2)."""

    eps: float = 0.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.mask_chance(t)

    def alpha_prime(self, t: Tensor) -> Tensor:
        return (self.eps - 1) * math.pi / 2 * torch.sin(math.pi / 2 * t)

    def mask_chance(self, t: Tensor) -> Tensor:
        return (1 - self.eps) * 2 * torch.sin(math.pi / 4 * t) ** 2  # 1 - cos 2a = 2 sin^2 a


@dataclass(frozen=True)
class CosineSquared:
    """alpha_t = eps + (1 - eps) cos^2(pi t / 2)."""

    eps: float = 0.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.mask_chance(t)

    def alpha_prime(self, t: Tensor) -> Tensor:
        return (self.eps - 1) * math.pi / 2 * torch.sin(math.pi * t)

    def mask_chance(self, t: Tensor) -> Tensor:
        return (1 - self.eps) * torch.sin(math.pi / 2 * t) ** 2


@dataclass(frozen=True)
class Linear:
    """-log alpha_t = sigma_min + t (sigma_max - sigma_min): sigma_t is linear, alpha_t is not."""

    sigma_min: float = 0.0
    sigma_max: float = 10.0

    def _sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min + t * (self.sigma_max - self.sigma_min)

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-self._sigma(t))

    def alpha_prime(self, t: Tensor) -> Tensor:
        return -(self.sigma_max - self.sigma_min) * self.alpha(t)

    def mask_chance(self, t: Tensor) -> Tensor:
        return -torch.expm1(-self._sigma(t))


@dataclass(frozen=True)
class Geometric:
    """-log alpha_t = sigma_min^(1 - t) sigma_max^t."""

    sigma_min: float = 1e-4
    sigma_max: float = 1.0

    def _sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min ** (1 - t) * self.sigma_max**t

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-self._sigma(t))

    def alpha_prime(self, t: Tensor) -> Tensor:
        return -math.log(self.sigma_max / self.sigma_min) * self._sigma(t) * self.alpha(t)

    def mask_chance(self, t: Tensor) -> Tensor:
        return -torch.expm1(-self._sigma(t))


def sigma(schedule: NoiseSchedule, t: Tensor) -> Tensor:
    """sigma_t = -log alpha_t, the input of time-conditioned networks; finite where alpha_t > 0.

    Computed from 1 - alpha_t where alpha_t is large and from alpha_t where it is small: each is precise there.
    """
    alpha, mask_chance = schedule.alpha(t), schedule.mask_chance(t)
    return torch.where(alpha > 0.5, -torch.log1p(-mask_chance), -torch.log(alpha))


def sigma_prime(schedule: NoiseSchedule, t: Tensor) -> Tensor:
    """d sigma_t / dt = -alpha'_t / alpha_t."""
    return -schedule.alpha_prime(t) / schedule.alpha(t)
