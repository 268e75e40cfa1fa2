"""The reverse walk, one full posterior a step: slow and obviously right.

The oracle of the samplers that draw positions first; and the walk of those that cannot, because how likely a token is
revealed depends on what the network believes (D3PM, SEDD's scores).

Shapes: B sequences, L tokens, V symbols, K steps.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.diffusion.masking import transition
from adlm.sampling.frame import Frame, first_frame
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
    """`shape` of log beliefs (B, L, V); padding shows no symbol."""
    flat, places = log_beliefs.flatten(0, 1), torch.arange(z.numel(), device=z.device)
    seen = seen_symbols(visible_ids(z, pad), places, flat.shape[-1]) if sampling.repetition_penalty > 1 else None
    return shape(flat, sampling, seen).view(log_beliefs.shape)


def sample_reference(
    one_step: Transition,
    beliefs: BeliefsFunction,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """From the canvas to text by `one_step` after the other, a Frame each, then `final` for what is still masked.

    Tokens given on the canvas stay: they are neither drawn nor remasked.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    open_ = canvas == mask_id
    for step in range(len(steps.reveal)):
        chances = one_step(frame.ids, step)
        drawn = torch.where(open_, categorical(chances, _everywhere(draws, open_)), canvas)
        frame = _after(frame, drawn, steps, step, chances, mask_id)
        yield frame
    if (frame.ids == mask_id).any():
        last = beliefs(frame.ids, steps.told[-1].expand(len(canvas)))
        if sampling.final == "argmax":
            chances, guess = last.exp(), last.argmax(dim=-1)
        else:
            chances = shape_everywhere(last, frame.ids, sampling, pad)
            guess = categorical(chances, _everywhere(draws, open_))
        ids = torch.where(frame.ids == mask_id, guess, frame.ids)
        yield _after(frame, ids, steps, len(steps.reveal), chances, mask_id)


def _everywhere(draws: RowRng, open_: Tensor) -> Tensor:
    """(B, L), a uniform number of the row's own at every open place."""
    return torch.zeros(open_.shape, dtype=torch.float64, device=open_.device).masked_scatter(
        open_, draws.at_tokens(open_)
    )


def _after(before: Frame, ids: Tensor, steps: Steps, step: int, chances: Tensor, mask_id: int) -> Frame:
    was, now = before.ids == mask_id, ids == mask_id
    revealed = was & ~now
    whole = chances.index_fill(-1, torch.tensor(mask_id, device=ids.device), 0.0).sum(dim=-1)
    drawn = chances.gather(-1, ids[..., None])[..., 0] / whole  # among tokens, not against staying masked
    chance = torch.where(revealed, drawn.to(before.chance), before.chance.masked_fill(now, 0.0))
    t, alpha = (each[step].expand(len(ids)) for each in (steps.reached, steps.told))
    return Frame(ids, t, revealed, ~was & now, chance, before.ids, alpha)
