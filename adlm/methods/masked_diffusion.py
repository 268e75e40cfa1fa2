"""What the masked diffusion methods share: noising a batch, its weights, the bound's ends, the walk.

Knows the networks only as functions from noisy ids to logits.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adlm.config import schema
from adlm.config.schema import Config, Sampling, Vocabulary
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import subs
from adlm.diffusion.masking import mask_tokens
from adlm.diffusion.objectives import continuous_weight, discrete_weight, prior_nats
from adlm.diffusion.schedules import Schedule
from adlm.diffusion.times import draw_grid_times, draw_times, grid
from adlm.errors import UserError
from adlm.sampling.frame import Frame
from adlm.sampling.plain import REMASKING, walk

SCHEDULES: dict[str, Callable[[schema.Schedule], Schedule]] = {
    "log-linear": lambda knobs: schedules.LogLinear(knobs.eps),
    "linear": lambda knobs: schedules.Linear(knobs.sigma_min, knobs.sigma_max),
    "cosine": lambda knobs: schedules.Cosine(knobs.eps),
    "cosine-squared": lambda knobs: schedules.CosineSquared(knobs.eps),
    "geometric": lambda knobs: schedules.Geometric(knobs.sigma_min, knobs.sigma_max),
}

NatsAt = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(z, where, sigma, pad) -> nats (B, L) of the clean tokens at the positions `where`."""


@dataclass(frozen=True)
class Noised:
    """A batch as a masked diffusion network meets it."""

    z: Tensor
    """(B, L), noisy ids."""
    t: Tensor
    """(B,), times, in double precision."""
    s: Tensor | None = None
    """(B,), where the step from t ends in discrete time; empty in continuous time."""


def schedule_of(config: Config) -> Schedule:
    return SCHEDULES[config.schedule.name](config.schedule)


def vocabulary_of(config: Config) -> Vocabulary:
    if config.vocabulary is None:
        raise UserError(
            "vocabulary is not settled yet: take it from a tokenizer (adlm.tokens), "
            "or give vocabulary.size and vocabulary.mask_id"
        )
    return config.vocabulary


def check_clean(x: Tensor, vocabulary: Vocabulary) -> None:
    """Clean ids are ids, and none of them is the mask."""
    _check_ids(x, vocabulary, "text")
    masks = int((x == vocabulary.mask_id).sum())
    if masks:
        raise UserError(
            f"the text holds the mask id {vocabulary.mask_id} at {masks} of {x.numel()} positions; "
            "clean text never does: masks are laid by the method"
        )


def check_canvas(canvas: Tensor, vocabulary: Vocabulary) -> None:
    """A canvas has something to fill in."""
    _check_ids(canvas, vocabulary, "canvas")
    complete = (canvas != vocabulary.mask_id).all(dim=1)
    if complete.any():
        raise UserError(
            f"row {int(complete.nonzero()[0])} of the canvas has no mask id {vocabulary.mask_id}: there is nothing to "
            "fill in; put the mask where text is wanted"
        )


def _check_ids(ids: Tensor, vocabulary: Vocabulary, what: str) -> None:
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise UserError(
            f"the {what} must be int64 ids of shape (sequences, length), not {str(ids.dtype).removeprefix('torch.')} "
            f"of shape {tuple(ids.shape)}"
        )
    outside = (ids < 0) | (ids >= vocabulary.size)
    if outside.any():
        raise UserError(
            f"the {what} holds id {int(ids[outside][0])}, outside the vocabulary of {vocabulary.size} symbols; "
            "was it made with another tokenizer?"
        )


def noise(config: Config, x: Tensor, pad: Tensor | None, generator: torch.Generator, t_min: float) -> Noised:
    """One time a sequence, and masks laid on x for it. Padding is masked only where the network attends to it."""
    vocabulary, time = vocabulary_of(config), config.time
    s = None
    if time.steps:
        t, s = draw_grid_times(len(x), time.steps, generator, time.antithetic)
    else:
        t = draw_times(len(x), generator, t_min, time.antithetic)
    chance = schedule_of(config).mask_chance(t).float().to(x.device)[:, None]
    z = mask_tokens(x, chance, vocabulary.mask_id, generator)
    if pad is not None and config.data.pad == "masked":
        z = torch.where(pad, x, z)
    return Noised(z, t, s)


def weight(config: Config, noised: Noised) -> Tensor:
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
    masked = z == vocabulary_of(config).mask_id
    return masked if pad is None else masked & ~pad


def told_sigma(config: Config, t: Tensor, device: torch.device) -> Tensor | None:
    """(B,), the noise the network is told, if it is told any."""
    return schedules.sigma(schedule_of(config), t).float().to(device) if config.model.time_conditioning else None


def seen_pad(config: Config, pad: Tensor | None) -> Tensor | None:
    """The padding the network must not attend to."""
    return pad if config.data.pad == "masked" else None


def num_tokens(x: Tensor, pad: Tensor | None) -> int:
    return x.numel() if pad is None else int((~pad).sum())


def bound(config: Config, nats_at: NatsAt, x: Tensor, pad: Tensor | None, generator: torch.Generator) -> Tensor:
    """nats (B, L) whose expectation is the NELBO, with what the schedule's two ends cost.

    Times are drawn from all of (0, 1]. A schedule that begins with alpha_0 < 1 leaves tokens masked at t = 0, which the
    last belief must name; one that ends with alpha_1 > 0 pays `prior_nats`. Log-linear with eps 0 pays neither.
    """
    vocabulary, schedule = vocabulary_of(config), schedule_of(config)
    check_clean(x, vocabulary)
    noised = noise(config, x, pad, generator, t_min=0.0)
    nats = weight(config, noised) * _masked_nats(config, nats_at, noised, x, pad)
    start = torch.zeros(len(x), dtype=torch.float64, device=generator.device)
    if schedule.mask_chance(start[0]) > 0:
        chance = schedule.mask_chance(start).float().to(x.device)[:, None]
        left_masked = Noised(mask_tokens(x, chance, vocabulary.mask_id, generator), start)
        nats = nats + _masked_nats(config, nats_at, left_masked, x, pad)
    nats = nats + prior_nats(schedule, vocabulary.num_clean)
    return nats if pad is None else nats.masked_fill(pad, 0.0)


def _masked_nats(config: Config, nats_at: NatsAt, noised: Noised, x: Tensor, pad: Tensor | None) -> Tensor:
    where = masked_positions(config, noised.z, pad)
    return nats_at(noised.z, where, told_sigma(config, noised.t, x.device), seen_pad(config, pad))


def generate(
    config: Config, network: nn.Module, canvas: Tensor, sampling: Sampling, generator: torch.Generator
) -> Iterator[Frame]:
    """The plain walk with the network's SUBS beliefs."""
    mask_id = vocabulary_of(config).mask_id
    check_canvas(canvas, vocabulary_of(config))
    if canvas.shape[1] > config.length:
        raise UserError(
            f"the canvas is {canvas.shape[1]} tokens long and the model was made for length {config.length}"
        )

    @torch.no_grad()
    def beliefs(z: Tensor, t: Tensor) -> Tensor:
        with evaluating(network):
            logits = network(z, told_sigma(config, t.expand(len(z)), z.device))
        return subs(logits, z, mask_id).exp()

    times = grid(sampling.steps, sampling.t_end)
    remasking = REMASKING[sampling.sampler]
    return walk(
        beliefs,
        canvas,
        mask_id,
        times,
        schedule_of(config).alpha(times),
        lambda ceiling: remasking(sampling.eta, ceiling),
        sampling.final,
        generator,
    )


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Dropout off inside, as it was before outside."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
