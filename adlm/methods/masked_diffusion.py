"""What the masked diffusion methods share: noising a batch, its weights, the bound's ends.

Knows the networks only as functions from noisy ids to logits.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adlm.config import schema
from adlm.config.schema import Config
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import subs
from adlm.diffusion.masking import mask_tokens
from adlm.diffusion.objectives import continuous_weight, discrete_weight, prior_nats
from adlm.diffusion.schedules import Schedule
from adlm.diffusion.times import BatchSlice, draw_grid_times, draw_times
from adlm.methods.inputs import attention_pad, check_clean, eval_mode, not_pad, vocabulary_of

SCHEDULES: dict[str, Callable[[schema.Schedule], Schedule]] = {
    "log-linear": lambda knobs: schedules.LogLinear(knobs.eps),
    "linear": lambda knobs: schedules.Linear(knobs.sigma_min, knobs.sigma_max),
    "cosine": lambda knobs: schedules.Cosine(knobs.eps),
    "cosine-squared": lambda knobs: schedules.CosineSquared(knobs.eps),
    "geometric": lambda knobs: schedules.Geometric(knobs.sigma_min, knobs.sigma_max),
}


@dataclass(frozen=True)
class NoisedBatch:
    """A batch as a masked diffusion network meets it."""

    z: Tensor
    """(B, L), noisy ids."""
    t: Tensor
    """(B,), times, in double precision."""
    s: Tensor | None = None
    """(B,), where the step from t ends in discrete time; empty in continuous time."""


def schedule_of(config: Config) -> Schedule:
    return SCHEDULES[config.schedule.name](config.schedule)


def noise(
    config: Config,
    x: Tensor,
    pad: Tensor | None,
    generator: torch.Generator,
    t_min: float,
    portion: BatchSlice | None = None,
) -> NoisedBatch:
    """One time a sequence, and masks laid on x for it. Padding is masked only where the network attends to it."""
    check_clean(config, x, pad)
    s = None
    if config.time.steps:
        t, s = draw_grid_times(len(x), config.time.steps, generator, config.time.antithetic, portion)
    else:
        t = draw_times(len(x), generator, t_min, config.time.antithetic, portion)
    return NoisedBatch(_masked(config, x, pad, t, generator, portion), t, s)


def _masked(
    config: Config, x: Tensor, pad: Tensor | None, t: Tensor, generator: torch.Generator, portion: BatchSlice | None
) -> Tensor:
    chance = schedule_of(config).mask_chance(t).float().to(x.device)[:, None]
    z = mask_tokens(x, chance, vocabulary_of(config).mask_id, generator, portion)
    hidden_pad = attention_pad(config, pad)
    return z if hidden_pad is None else torch.where(hidden_pad, x, z)


def weight(config: Config, noised: NoisedBatch) -> Tensor:
    """(B, 1), the weight of each sequence's cross-entropies, in float32."""
    schedule = schedule_of(config)
    if noised.s is None:
        weights = continuous_weight(schedule, noised.t)
    else:
        weights = discrete_weight(
            schedule.alpha(noised.s), schedule.alpha(noised.t), config.time.steps, config.time.sigma
        )
    return weights.float().to(noised.z.device)[:, None]


def masked_positions(config: Config, z: Tensor, pad: Tensor | None) -> Tensor:
    """True where a token is hidden and counts."""
    return (z == vocabulary_of(config).mask_id) & not_pad(z, pad)


def conditioning_sigma(config: Config, t: Tensor, device: torch.device) -> Tensor | None:
    """(B,), the noise the network is told, if it is told any."""
    return schedules.sigma(schedule_of(config), t).float().to(device) if config.model.time_conditioning else None


def bound(
    config: Config,
    nats_at: Callable[[NoisedBatch], Tensor],
    x: Tensor,
    pad: Tensor | None,
    generator: torch.Generator,
    last: Callable[[NoisedBatch], Tensor] | None = None,
    portion: BatchSlice | None = None,
) -> Tensor:
    """nats (B, L) whose expectation is the NELBO, with what the schedule's two ends cost.

    `nats_at` gives the weighted nats of a noising, `last` those of naming what is still masked at t = 0, where it is
    needed: where alpha_0 < 1. Times are from all of (0, 1], the earliest oftener than others: uniform ones, at which a
    single mask at t pays 1/t, give an estimate whose variance is not finite. A schedule that ends with alpha_1 > 0 pays
    `prior_nats`. Log-linear with eps 0 pays for neither end.
    """
    schedule = schedule_of(config)
    noised, unlikely = _noised_for_bound(config, x, pad, generator, portion)
    nats = nats_at(noised) * unlikely.float().to(x.device)[:, None]
    start = torch.zeros(len(x), dtype=torch.float64, device=generator.device)
    if last is not None and schedule.mask_chance(start[0]) > 0:
        nats = nats + last(NoisedBatch(_masked(config, x, pad, start, generator, portion), start))
    return (nats + prior_nats(schedule, vocabulary_of(config).num_clean)) * not_pad(x, pad)


def _noised_for_bound(
    config: Config, x: Tensor, pad: Tensor | None, generator: torch.Generator, portion: BatchSlice | None
) -> tuple[NoisedBatch, Tensor]:
    """A noising for the bound, and by how much rarer (B,) its times are than they should be.

    Before t0 = 2 / L a row has about one mask or none, and one mask pays 1/t. Twice as many rows as uniform times would
    send there are sent there, spread as t0 u^2, so that what one mask pays grows as 1 / sqrt t. After it times are
    uniform. In discrete time no step is so early that it matters, and all times are.
    """
    if config.time.steps:
        return noise(config, x, pad, generator, 0.0, portion), torch.ones(len(x), dtype=torch.float64)
    check_clean(config, x, pad)
    u = draw_times(len(x), generator, antithetic=config.time.antithetic, portion=portion)
    t0 = min(0.25, 2 / x.shape[1])
    early, share = u <= 2 * t0, u / (2 * t0)
    slope = (1 - t0) / (1 - 2 * t0)
    t = torch.where(early, t0 * share**2, t0 + slope * (u - 2 * t0))
    return NoisedBatch(_masked(config, x, pad, t, generator, portion), t), torch.where(early, share, slope)


def log_beliefs(config: Config, network: nn.Module, z: Tensor, alpha: Tensor | None) -> Tensor:
    """SUBS log beliefs (B, L, V)."""
    return subs(logits_at(config, network, z, alpha), z, vocabulary_of(config).mask_id)


@torch.no_grad()
def logits_at(config: Config, network: nn.Module, z: Tensor, alpha: Tensor | None) -> Tensor:
    """Logits (B, L, V), dropout off."""
    with eval_mode(network):
        return network(z, conditioning_sigma_of(config, z, alpha))  # type: ignore[no-any-return]


def conditioning_sigma_of(config: Config, z: Tensor, alpha: Tensor | None, pad: Tensor | None = None) -> Tensor | None:
    """(B,), the noise the network is told of z, if it is told any: -log alpha (B,), or that of the share of masks."""
    if not config.model.time_conditioning:
        return None
    if alpha is not None:
        return -torch.log(alpha).float().to(z.device)
    share = masked_positions(config, z, pad).sum(dim=1).double() / not_pad(z, pad).sum(dim=1)
    return conditioning_sigma(config, share, z.device)
