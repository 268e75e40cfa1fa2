"""Reference sampling: one full posterior per step, slow and simple.

The positions-first samplers are tested against it. It also serves the methods whose reveal probability depends on the
network's output (D3PM, SEDD's analytic update).

Shapes: B sequences, L tokens, V symbols, K steps.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.diffusion.masking import transition
from adlm.sampling.frame import Frame, SamplingRun, first_frame
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.shaping import seen_symbols, shape, visible_ids
from adlm.sampling.steps import Steps

BeliefsFunction = Callable[[Tensor, Tensor], Tensor]
"""Noisy ids (B, L) and the share alpha (B,) of visible tokens -> log beliefs in clean tokens (B, L, V)."""
Transition = Callable[[Tensor, int], Tensor]
"""(z, k) -> p(z_s | z_t) of step k, (B, L, V)."""


def reference_transition(beliefs: BeliefsFunction, mask_id: int, steps: Steps, sampling: Sampling) -> Transition:
    """One reverse step with SUBS beliefs."""

    def one_step(z: Tensor, step: int) -> Tensor:
        shaped = shape_everywhere(beliefs(z, steps.alpha_t[step].expand(len(z))), z, sampling)
        return transition(z, shaped.double(), steps.reveal[step], steps.remask[step], mask_id)

    return one_step


def shape_everywhere(log_beliefs: Tensor, z: Tensor, sampling: Sampling, pad: Tensor | None = None) -> Tensor:
    """`shape` applied to log beliefs (B, L, V); padding does not count as a seen symbol."""
    flat, positions = log_beliefs.flatten(0, 1), torch.arange(z.numel(), device=z.device)
    seen = seen_symbols(visible_ids(z, pad), positions, flat.shape[-1]) if sampling.repetition_penalty > 1 else None
    return shape(flat, sampling, seen).view(log_beliefs.shape)


def sample_reference(run: SamplingRun, one_step: Transition, beliefs: BeliefsFunction) -> Iterator[Frame]:
    """From the canvas to text, one Frame per step, then one by `sampling.final` for what is still masked.

    Tokens given on the canvas stay: they are neither drawn nor remasked. `run.denoiser` is not used.
    """
    canvas, mask_id, steps, sampling, rng = run.canvas, run.mask_id, run.steps, run.sampling, run.rng
    frame = first_frame(canvas, mask_id)
    yield frame
    to_fill = canvas == mask_id
    for step in range(len(steps.reveal)):
        probabilities = one_step(frame.ids, step)
        drawn = torch.where(to_fill, categorical(probabilities, _uniforms(rng, to_fill)), canvas)
        frame = _next_frame(frame, drawn, steps, step, probabilities, mask_id)
        yield frame
    if (frame.ids == mask_id).any():
        log_beliefs = beliefs(frame.ids, steps.conditioning_alpha[-1].expand(len(canvas)))
        if sampling.final == "argmax":
            probabilities, tokens = log_beliefs.exp(), log_beliefs.argmax(dim=-1)
        else:
            probabilities = shape_everywhere(log_beliefs, frame.ids, sampling, run.pad)
            tokens = categorical(probabilities, _uniforms(rng, to_fill))
        ids = torch.where(frame.ids == mask_id, tokens, frame.ids)
        yield _next_frame(frame, ids, steps, len(steps.reveal), probabilities, mask_id)


def _uniforms(rng: RowRng, to_fill: Tensor) -> Tensor:
    """(B, L), a uniform number from the row's token stream where `to_fill`, 0 elsewhere."""
    zeros = torch.zeros(to_fill.shape, dtype=torch.float64, device=to_fill.device)
    return zeros.masked_scatter(to_fill, rng.at_tokens(to_fill))


def _next_frame(before: Frame, ids: Tensor, steps: Steps, step: int, probabilities: Tensor, mask_id: int) -> Frame:
    was_masked, is_masked = before.ids == mask_id, ids == mask_id
    revealed = was_masked & ~is_masked
    clean_mass = probabilities.index_fill(-1, torch.tensor(mask_id, device=ids.device), 0.0).sum(dim=-1)
    drawn = probabilities.gather(-1, ids[..., None])[..., 0] / clean_mass  # given that the position is revealed
    chance = torch.where(revealed, drawn.to(before.chance), before.chance.masked_fill(is_masked, 0.0))
    t, alpha = (each[step].expand(len(ids)) for each in (steps.end_time, steps.conditioning_alpha))
    return Frame(ids, t, revealed, ~was_masked & is_masked, chance, before.ids, alpha)
