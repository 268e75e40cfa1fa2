"""From a Config to the forward process: schedule, noised batches, loss weights, sigma. Does not depend on networks.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.diffusion import schedules
from adlm.diffusion.masking import mask_tokens
from adlm.diffusion.objectives import continuous_weight, discrete_weight
from adlm.diffusion.schedules import NoiseSchedule
from adlm.diffusion.times import BatchRng, draw_grid_times, draw_times
from adlm.methods.inputs import attention_pad, not_pad, vocabulary_of
from adlm.registry import SCHEDULES


@dataclass(frozen=True)
class NoisedBatch:
    """A batch after the forward process: the input of a masked diffusion network."""

    z: Tensor
    """(B, L), noisy ids."""
    t: Tensor
    """(B,), the time of each sequence, in double precision."""
    s: Tensor | None = None
    """(B,), the end of the step from t in discrete time; None in continuous time."""


def schedule_of(config: Config) -> NoiseSchedule:
    """The schedule that the config names; its fields are the options of the same names."""
    schedule = SCHEDULES[config.schedule.name]
    return schedule(*(getattr(config.schedule, field.name) for field in fields(schedule)))  # type: ignore[no-any-return]


def noise(config: Config, x: Tensor, pad: Tensor | None, rng: BatchRng, t_min: float) -> NoisedBatch:
    """z_t ~ q(z_t | x) at one random time t per sequence. Padding is masked only if the network attends to it."""
    s = None
    if config.time.steps:
        t, s = draw_grid_times(len(x), config.time.steps, rng, config.time.antithetic)
    else:
        t = draw_times(len(x), rng, t_min, config.time.antithetic)
    return NoisedBatch(noise_at(config, x, pad, t, rng), t, s)


def noise_at(config: Config, x: Tensor, pad: Tensor | None, t: Tensor, rng: BatchRng) -> Tensor:
    """z_t ~ q(z_t | x) (B, L) at given times t (B,)."""
    mask_chance = schedule_of(config).mask_chance(t).float().to(x.device)[:, None]
    z = mask_tokens(x, mask_chance, vocabulary_of(config).mask_id, rng)
    unattended = attention_pad(config, pad)
    return z if unattended is None else torch.where(unattended, x, z)


def weight(config: Config, noised: NoisedBatch) -> Tensor:
    """(B, 1), the loss weight of each sequence in float32: Eq. 4's, or Eq. 7's where `time.steps` is not 0."""
    schedule = schedule_of(config)
    if noised.s is None:
        weights = continuous_weight(schedule, noised.t)
    else:
        weights = discrete_weight(
            schedule.alpha(noised.s), schedule.alpha(noised.t), config.time.steps, config.time.sigma
        )
    return weights.float().to(noised.z.device)[:, None]


def masked_positions(config: Config, z: Tensor, pad: Tensor | None) -> Tensor:
    """(B, L), True at masks outside the padding."""
    return (z == vocabulary_of(config).mask_id) & not_pad(z, pad)


def conditioning_sigma(config: Config, t: Tensor, device: torch.device) -> Tensor | None:
    """The noise level sigma_t = -log alpha_t (B,) for time-conditioned networks, else None."""
    return schedules.sigma(schedule_of(config), t).float().to(device) if config.model.time_conditioning else None


def noise_for_bound(config: Config, x: Tensor, pad: Tensor | None, rng: BatchRng) -> tuple[NoisedBatch, Tensor]:
    """A noised batch for the bound and its importance weights (B,): the uniform density of t over the one drawn from.

    Before t0 = 2 / L a row has about one mask or none, and one mask contributes 1/t, so uniform times would give an
    estimate of infinite variance. Therefore times below t0 get twice their uniform share, distributed as t0 u^2: the
    weighted contribution of one mask then grows as 1 / sqrt(t). Later times are uniform. In discrete time all times
    are uniform: no step is so early that it matters.
    """
    if config.time.steps:
        return noise(config, x, pad, rng, 0.0), torch.ones(len(x), dtype=torch.float64)
    u = draw_times(len(x), rng, antithetic=config.time.antithetic)
    t0 = min(0.25, 2 / x.shape[1])
    is_early, share = u <= 2 * t0, u / (2 * t0)
    slope = (1 - t0) / (1 - 2 * t0)
    t = torch.where(is_early, t0 * share**2, t0 + slope * (u - 2 * t0))
    return NoisedBatch(noise_at(config, x, pad, t, rng), t), torch.where(is_early, share, slope)


def conditioning_sigma_of(config: Config, z: Tensor, alpha: Tensor | None, pad: Tensor | None = None) -> Tensor | None:
    """(B,) for time-conditioned networks, else None: -log alpha if given, else sigma at t = the share of masks in z."""
    if not config.model.time_conditioning:
        return None
    if alpha is not None:
        return -torch.log(alpha).float().to(z.device)
    share = masked_positions(config, z, pad).sum(dim=1).double() / not_pad(z, pad).sum(dim=1)
    return conditioning_sigma(config, share, z.device)
