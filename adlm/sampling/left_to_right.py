"""Drawing one token after the other. Knows a network only as `beliefs(x)`: ids so far -> the next token's distribution.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.sampling.draws import draw
from adlm.sampling.frame import Frame, changed, start


def plain_left_to_right(
    beliefs: Callable[[Tensor], Tensor], canvas: Tensor, mask_id: int, generator: torch.Generator
) -> Iterator[Frame]:
    """Every mask of the canvas (B, L) in order, the whole prefix read anew for each token; given tokens stay.

    `beliefs` maps ids (B, l) to probabilities (B, V) of token l + 1. The first token of every row must be given.
    """
    length = canvas.shape[1]
    yield start(canvas, 1.0, mask_id)
    x = canvas
    for place in range(1, length):
        hole = canvas[:, place] == mask_id
        if not hole.any():
            continue
        column = torch.where(hole, draw(beliefs(x[:, :place]), generator), canvas[:, place])
        after = torch.cat([x[:, :place], column[:, None], x[:, place + 1 :]], dim=1)
        frame = changed(x, after, 1 - (place + 1) / length, mask_id)
        x = frame.ids
        yield frame
