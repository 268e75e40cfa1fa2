"""The interface of a sampler: the denoiser it calls and the frames it yields.

Shapes: B sequences, L tokens, N positions, V symbols. Positions are flat: row * L + position.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adlm.errors import UserError


@dataclass(frozen=True)
class Frame:
    """One state of a walk. Rows walk on their own: each has its own time."""

    ids: Tensor
    """(B, L), masks where nothing is revealed yet."""
    t: Tensor
    """(B,), the time each row has come to, in double precision; 1 at the start."""
    revealed: Tensor
    """(B, L), True where a mask became a token since the frame before."""
    remasked: Tensor
    """(B, L), True where a token was masked again since the frame before; it may have been revealed anew since."""
    chance: Tensor
    """(B, L), the probability each drawn token had where it was drawn; 1 at tokens that were given, 0 at masks."""
    read: Tensor
    """(B, L), the ids that the network read to reveal what is revealed here; the canvas on the first frame.

    Of a canvas longer than the model it read the window alone.
    """
    alpha: Tensor | None
    """(B,), the share of visible tokens that it was told meanwhile; None if it goes by its own count, or by none."""


def last_frame(frames: Iterator[Frame]) -> Frame:
    """Where a walk ends; the frames before it are let go one by one."""
    last: Frame = deque(frames, maxlen=1)[0]
    if not last.chance.isfinite().all():
        raise UserError("the model's beliefs are not finite: its weights or its precision do not hold")
    return last


def first_frame(canvas: Tensor, mask_id: int) -> Frame:
    """The canvas itself, before any step."""
    nothing = torch.zeros_like(canvas, dtype=torch.bool)
    start = torch.ones(len(canvas), dtype=torch.float64)
    return Frame(canvas, start, nothing, nothing, (canvas != mask_id).float(), canvas, None)


class DenoiserOutput(Protocol):
    """What a network says of one state, asked for where it is wanted: a head is as much work as a few blocks."""

    def log_beliefs(self, places: Tensor) -> Tensor:
        """(N, V), of the clean token at masked places (N,); -inf at the mask."""
        ...

    def anchor_log_beliefs(self, places: Tensor) -> Tensor:
        """The anchor network's (N, V)."""
        ...


class Denoiser(Protocol):
    def __call__(self, z: Tensor, alpha: Tensor | None, pad: Tensor | None) -> DenoiserOutput:
        """Reads z (B, L). A network that is told the noise is told -log alpha (B,), or goes by the share of masks."""
        ...
