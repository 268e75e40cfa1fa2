"""Left-to-right sampling for causal networks, one token at a time. Does not depend on network classes or caches.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.constrained import NextTokens
from adlm.sampling.frame import Ending, Frame, end_texts, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens, draw_shaped, shape, symbols_of, visible_ids

NextTokenModel = Callable[[Tensor], Tensor]
"""The next ids (B, n) of every row -> log beliefs (B, V) in the token after them. Stateful: it keeps earlier ids."""

NextTokenSampler = Callable[[Tensor, Tensor, Tensor], DrawnTokens]
"""The next ids (B, n) of every row, all visible ids (B, L), uniform numbers (B,) -> the tokens after the next ids.

The result may be overwritten by the next call.
"""


def sampler_from_model(
    model: NextTokenModel, sampling: Sampling, constrain: NextTokens | None = None
) -> NextTokenSampler:
    """Runs the model, then draws from its beliefs, given the constraints on the next token if there are any."""
    num_read = 0

    def next_token(ids: Tensor, z: Tensor, uniforms: Tensor) -> DrawnTokens:
        nonlocal num_read
        num_read += ids.shape[1]
        log_beliefs = model(ids)
        if constrain is not None:
            log_beliefs = constrain(log_beliefs, z, torch.full((len(z),), num_read))
        return draw_next(log_beliefs, z, uniforms, sampling)

    return next_token


def draw_next(log_beliefs: Tensor, z: Tensor | None, uniforms: Tensor, sampling: Sampling) -> DrawnTokens:
    """One token per row from beliefs (B, V) and uniform numbers (B,); z (B, L) is read if `needs_history`."""
    seen = symbols_of(z, log_beliefs.shape[-1]) if z is not None and needs_history(sampling) else None
    return draw_shaped(shape(log_beliefs, sampling, seen), uniforms)


def needs_history(sampling: Sampling) -> bool:
    """Whether a draw depends on the row's visible tokens beyond the beliefs: the repetition penalty does."""
    return sampling.repetition_penalty > 1


def sample_left_to_right(
    next_token: NextTokenSampler,
    canvas: Tensor,
    mask_id: int,
    rng: RowRng,
    pad: Tensor | None = None,
    ending: Ending | None = None,
) -> Iterator[Frame]:
    """Fills every mask of the canvas (B, L) in order, one Frame per column with a mask; given tokens stay.

    The first token of every row must be given. The prefix that is given in all rows is read in one call. `ending` says
    which texts end with the first eos drawn, see `end_texts`.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    masked = canvas == mask_id
    uniforms = torch.zeros(canvas.shape, dtype=torch.float64, device=canvas.device)
    uniforms.masked_scatter_(masked, rng.at_tokens(masked))
    first = int((~masked).long().cumprod(dim=1).sum(dim=1).min())
    has_mask = masked.any(dim=0).tolist()
    num_read = 0
    for position in range(first, canvas.shape[1]):
        if has_mask[position]:
            drawn = next_token(frame.ids[:, num_read:position], visible_ids(frame.ids, pad), uniforms[:, position])
            num_read = position
            revealed = torch.zeros_like(frame.revealed)
            revealed[:, position] = masked[:, position]
            frame = Frame(
                ids=torch.where(revealed, drawn.tokens[:, None], frame.ids),
                t=torch.full_like(frame.t, 1 - (position + 1) / frame.ids.shape[1]),
                revealed=revealed,
                remasked=frame.remasked,  # nothing is ever remasked: all frames share one
                chance=torch.where(revealed, drawn.chance[:, None], frame.chance),
                read=frame.ids,
                alpha=None,
            )
            frame = end_texts(frame, ending)
            yield frame
            if ending is not None and not (frame.ids == mask_id).any():
                return
