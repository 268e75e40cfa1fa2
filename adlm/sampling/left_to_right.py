"""Drawing one token after the other. Knows a network only as a reader, or a writer, of what comes next.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens, draw_shaped, shape, symbols_of, visible_ids

NextTokenModel = Callable[[Tensor], Tensor]
"""The next ids (B, n) of every row -> log beliefs (B, V) in the token after them. It remembers what it was given."""

NextTokenSampler = Callable[[Tensor, Tensor, Tensor], DrawnTokens]
"""The next ids (B, n) of every row, all that the rows show (B, L), uniform numbers (B,) -> the tokens after those ids.

What it returns need not outlast its next call.
"""


def sampler_from_model(reader: NextTokenModel, sampling: Sampling) -> NextTokenSampler:
    """Reads, then draws."""
    return lambda ids, z, points: draw_next(reader(ids), z, points, sampling)


def draw_next(log_beliefs: Tensor, z: Tensor | None, points: Tensor, sampling: Sampling) -> DrawnTokens:
    """A token for every row by its beliefs (B, V) and uniform number (B,); z (B, L) if `looks_back`."""
    seen = symbols_of(z, log_beliefs.shape[-1]) if z is not None and needs_history(sampling) else None
    return draw_shaped(shape(log_beliefs, sampling, seen), points)


def needs_history(sampling: Sampling) -> bool:
    """Whether a draw depends on what its row shows beyond the beliefs: the guard against repetition."""
    return sampling.repetition_penalty > 1


def sample_left_to_right(
    writer: NextTokenSampler, canvas: Tensor, mask_id: int, draws: RowRng, pad: Tensor | None = None
) -> Iterator[Frame]:
    """Every mask of the canvas (B, L) in order, a Frame for each column that has one; given tokens stay.

    The first token of every row must be given. What all rows are given first is read at once.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    holes = canvas == mask_id
    points = torch.zeros(canvas.shape, dtype=torch.float64, device=canvas.device)
    points.masked_scatter_(holes, draws.at_tokens(holes))
    first = int((~holes).long().cumprod(dim=1).sum(dim=1).min())
    has_hole = holes.any(dim=0).tolist()
    num_read = 0
    for place in range(first, canvas.shape[1]):
        if has_hole[place]:
            drawn = writer(frame.ids[:, num_read:place], visible_ids(frame.ids, pad), points[:, place])
            num_read = place
            frame = _with_column(frame, place, holes[:, place], drawn)
            yield frame


def _with_column(frame: Frame, place: int, hole: Tensor, drawn: DrawnTokens) -> Frame:
    """The next frame. Nothing is ever remasked, so all share the tensor that says so."""
    revealed = torch.zeros_like(frame.revealed)
    revealed[:, place] = hole
    return Frame(
        ids=torch.where(revealed, drawn.tokens[:, None], frame.ids),
        t=torch.full_like(frame.t, 1 - (place + 1) / frame.ids.shape[1]),
        revealed=revealed,
        remasked=frame.remasked,
        chance=torch.where(revealed, drawn.chance[:, None], frame.chance),
        read=frame.ids,
        alpha=None,
    )
