"""Drawing one token after the other. Knows a network only as a reader of what comes next.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.draws import RowDraws
from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.shaping import draw_tokens

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
    row_starts = torch.arange(len(canvas), device=canvas.device) * canvas.shape[1]
    unread = canvas[:, :first]
    for place in range(first, canvas.shape[1]):
        if has_hole[place]:
            drawn = draw_tokens(reader(unread), frame.ids, row_starts + place, points[:, place], sampling)
            unread = canvas[:, :0]
            frame = _with_column(frame, place, holes[:, place], drawn.tokens, drawn.chance)
            yield frame
        unread = torch.cat([unread, frame.ids[:, place : place + 1]], dim=1)


def _with_column(frame: Frame, place: int, hole: Tensor, tokens: Tensor, chance: Tensor) -> Frame:
    ids, chances, revealed = frame.ids.clone(), frame.chance.clone(), torch.zeros_like(frame.revealed)
    ids[:, place] = torch.where(hole, tokens, ids[:, place])
    chances[:, place] = torch.where(hole, chance, chances[:, place])
    revealed[:, place] = hole
    t = torch.full_like(frame.t, 1 - (place + 1) / ids.shape[1])
    return Frame(ids, t, revealed, torch.zeros_like(revealed), chances)
