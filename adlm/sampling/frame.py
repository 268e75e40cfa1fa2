"""One state of a walk, as samplers yield it and whoever watches takes it. Knows nothing of how it came about."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Frame:
    """One state of a walk."""

    ids: Tensor
    """(B, L), masks where nothing is revealed yet."""
    t: float
    """The time the walk has come to; 1 at the start."""
    revealed: Tensor
    """(B, L), True where this step turned a mask into a token."""
    remasked: Tensor
    """(B, L), True where this step turned a token into a mask."""


def changed(before: Tensor, after: Tensor, t: float, mask_id: int) -> Frame:
    """The Frame of a step from one state to the next."""
    was, now = before == mask_id, after == mask_id
    return Frame(after, t, was & ~now, ~was & now)
