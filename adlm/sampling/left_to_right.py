"""Drawing one token after the other. Knows a network only as a reader of what comes next.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.draws import RowDraws
from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.shaping import Drawn, draw_tokens

Reader = Callable[[Tensor], Tensor]
"""The next ids (B, n) of every row -> log beliefs (B, V) in the token after them. It remembers what it was given."""


def left_to_right_walk(
    reader: Reader, canvas: Tensor, mask_id: int, sampling: Sampling, draws: RowDraws
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
    places = torch.arange(canvas.numel(), device=canvas.device).view(canvas.shape)
    num_read = 0
    for place in range(first, canvas.shape[1]):
        if has_hole[place]:
            log_beliefs = reader(frame.ids[:, num_read:place])
            num_read = place
            drawn = draw_tokens(log_beliefs, frame.ids, places[:, place], points[:, place], sampling)
            frame = _with_column(frame, place, holes[:, place], drawn)
            yield frame


def _with_column(frame: Frame, place: int, hole: Tensor, drawn: Drawn) -> Frame:
    """The next frame. Nothing is ever remasked, so all share the tensor that says so."""
    revealed = torch.zeros_like(frame.revealed)
    revealed[:, place] = hole
    return Frame(
        ids=torch.where(revealed, drawn.tokens[:, None], frame.ids),
        t=torch.full_like(frame.t, 1 - (place + 1) / frame.ids.shape[1]),
        revealed=revealed,
        remasked=frame.remasked,
        chance=torch.where(revealed, drawn.chance[:, None], frame.chance),
    )
