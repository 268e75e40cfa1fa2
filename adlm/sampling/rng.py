"""Exact categorical draws, and the uniform numbers they are made from. Knows nothing of what is drawn.

Shapes: B sequences, L tokens, N of them to draw, V symbols last.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.errors import UserError


class RowRng:
    """Uniform numbers that belong to (seed, row): neither the rows beside it nor padding change what a row draws.

    A row has two streams, one for the places where something happens and one for the tokens that are drawn there.
    `rows` are their numbers to whoever asked for them; all else here counts from 0.
    """

    def __init__(self, seed: int, rows: Sequence[int]):
        if seed < 0:
            raise UserError(f"seed {seed} must be 0 or more")
        self.rows = rows
        self._places, self._tokens = (
            [
                np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(row, stream))))
                for row in rows
            ]
            for stream in range(2)
        )

    def __len__(self) -> int:
        return len(self._places)

    def for_places(self, row: int, num: int) -> NDArray[np.float64]:
        """Numbers from [0, 1), 53 bits each."""
        return self._places[row].random(num)

    def for_tokens(self, row: int, num: int) -> NDArray[np.float64]:
        return self._tokens[row].random(num)

    def at_places(self, where: Tensor) -> Tensor:
        """(B, L), a number for places at each one that is True, in order; 1 elsewhere, which is below no chance."""
        flags = where.cpu().numpy()
        points = np.ones(flags.shape)
        for row, places in enumerate(flags):
            points[row, places] = self.for_places(row, int(places.sum()))
        return torch.from_numpy(points).to(where.device)

    def at_tokens(self, where: Tensor) -> Tensor:
        """(N,), a number for tokens at each place that is True, row by row."""
        counts = where.sum(dim=1).tolist()
        points = [self.for_tokens(row, count) for row, count in enumerate(counts)]
        return torch.from_numpy(np.concatenate(points)).to(where.device)


def categorical(weights: Tensor, points: Tensor) -> Tensor:
    """The symbol (...) at which the cumulative sum of weights (..., V) passes the point (...) of [0, 1), in float64.

    For a uniform point each symbol comes with its probability, and one of probability zero never. Gumbel noise in
    float32, the usual shortcut, cannot reach the tail of its distribution and so sharpens every categorical a little; a
    uniform number of 53 bits does not. About sqrt(V) symbols form a group: the group is found first, then the symbol in
    it, because a sum over 50,000 symbols in a row is a GPU's slowest way to add them.
    """
    width = math.isqrt(weights.shape[-1] - 1) + 1
    groups = torch.unflatten(F.pad(weights, (0, -weights.shape[-1] % width)), -1, (-1, width))
    sums = groups.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    target = points.to(ends)[..., None] * ends[..., -1:]
    group = _passed(ends, target)
    before = (ends - sums).gather(-1, group)
    chosen = groups.gather(-2, group[..., None].expand(*group.shape, width))[..., 0, :]
    inside = chosen.cumsum(dim=-1, dtype=torch.float64)
    return (group * width + _passed(inside, (target - before).clamp(min=0)))[..., 0]


def _passed(cumulative: Tensor, target: Tensor) -> Tensor:
    """Where a cumulative sum passes its target; where rounding carries the target to the end, its last increase."""
    last_increase = (cumulative < cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last_increase)
