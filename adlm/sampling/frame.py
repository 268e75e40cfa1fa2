"""One state of a walk, as samplers yield it and whoever watches takes it. Knows nothing of how it came about.

Shapes: B sequences, L tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frame:
    """One state of a walk."""

    ids: Tensor
    """(B, L), mask ids where nothing is revealed yet."""
    t: Tensor
    """(B,), float64: the time each row has come to; 1 at the start."""
    revealed: Tensor
    """(B, L), True where a mask became a token since the frame before."""
    remasked: Tensor
    """(B, L), True where a token was masked again since the frame before; with `revealed`, it was drawn anew."""
    chance: Tensor
    """(B, L), float32: what each drawn token's probability was when it was revealed; 1 if given, 0 at masks."""


def start(canvas: Tensor, t: float, mask_id: int) -> Frame:
    """The canvas itself, where nothing has changed yet."""
    nothing = torch.zeros_like(canvas, dtype=torch.bool)
    return Frame(canvas, _everywhere(canvas, t), nothing, nothing, (canvas != mask_id).float())


def changed(before: Tensor, after: Tensor, t: float, mask_id: int) -> Frame:
    """The Frame of a step from one state to the next; these walks do not tell the chances, so they are 1."""
    was, now = before == mask_id, after == mask_id
    return Frame(after, _everywhere(after, t), was & ~now, ~was & now, (~now).float())


def _everywhere(ids: Tensor, t: float) -> Tensor:
    return torch.full((len(ids),), t, dtype=torch.float64)
