"""Random times in [0, 1] for a batch, and time grids. Does not depend on schedules.

Shapes: B times, one per sequence; a grid of T steps has T + 1 times, falling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchSlice:
    """Which rows of a larger batch these are: random numbers are drawn for the larger batch, then sliced.

    So micro-batches and ranks get the same numbers as the whole batch.
    """

    first: int
    total: int

    def of(self, drawn: Tensor, num: int) -> Tensor:
        """The `num` rows of this slice, from numbers drawn for all rows."""
        assert 0 <= self.first <= self.first + num <= self.total
        return drawn[self.first : self.first + num]


def uniform(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device, portion: BatchSlice | None = None
) -> Tensor:
    """Numbers from [0, 1), drawn on the generator's device: a seed gives the same numbers for any target device."""
    portion = portion or BatchSlice(0, shape[0])
    batch_shape = portion.total, *shape[1:]
    drawn = torch.rand(batch_shape, generator=generator, device=generator.device, dtype=torch.float32)
    return portion.of(drawn, shape[0]).to(device)


def draw_times(
    num: int,
    generator: torch.Generator,
    t_min: float = 0.0,
    antithetic: bool = True,
    portion: BatchSlice | None = None,
) -> Tensor:
    """B times from (t_min, 1]; antithetic ones lie one in each of B equal strata, uniform within the stratum.

    The strata are assigned to rows at random, so that every row's time is uniform and its bound does not depend on its
    row in the batch. In double precision, on the generator's device. Time 1 can be drawn and time t_min cannot: at
    t = 0 the weight of the bound is infinite.
    """
    portion = portion or BatchSlice(0, num)
    below = uniform((portion.total,), generator, generator.device).double()
    strata = torch.randperm(portion.total, generator=generator, device=generator.device) + 1
    share = (strata - below) / portion.total if antithetic else 1 - below
    return t_min + (1 - t_min) * portion.of(share, num)


def draw_grid_times(
    num: int, steps: int, generator: torch.Generator, antithetic: bool = True, portion: BatchSlice | None = None
) -> tuple[Tensor, Tensor]:
    """B steps (t, s = t - 1/T) of the grid {1/T, ..., 1}, each step equally likely."""
    index = torch.ceil(draw_times(num, generator, antithetic=antithetic, portion=portion) * steps)
    return index / steps, (index - 1) / steps


def grid(steps: int, t_end: float = 0.0) -> Tensor:
    """T + 1 equally spaced times from 1 down to t_end, in double precision."""
    return torch.linspace(1, t_end, steps + 1, dtype=torch.float64)
