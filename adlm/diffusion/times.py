"""Random times in [0, 1] for a batch, and time grids. Does not depend on schedules.

Shapes: B times, one per sequence; a grid of T steps has T + 1 times, falling.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def keyed_generator(seed: int, *key: int) -> torch.Generator:
    """A generator whose stream is independent of those of other keys. On the CPU: the same numbers for every device."""
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


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


@dataclass(frozen=True)
class BatchRng:
    """A generator, and the rows of a larger batch that its numbers are for; without `rows` the batch is all there is.

    Numbers are drawn on the generator's device: a seed gives the same numbers for any target device.
    """

    generator: torch.Generator
    rows: BatchSlice | None = None

    def slice_of(self, num: int) -> BatchSlice:
        """The rows of a batch of `num` sequences."""
        return self.rows or BatchSlice(0, num)

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Numbers from [0, 1), one row of them for each sequence."""
        rows, generator = self.slice_of(shape[0]), self.generator
        batch_shape = rows.total, *shape[1:]
        drawn = torch.rand(batch_shape, generator=generator, device=generator.device, dtype=torch.float32)
        return rows.of(drawn, shape[0]).to(device)


def draw_times(
    num: int, rng: BatchRng, t_min: float = 0.0, antithetic: bool = True, power: float = 1.0, t_max: float = 1.0
) -> Tensor:
    """B times t_min + (t_max - t_min) u^power from (t_min, t_max], u uniform.

    Antithetic u lie one in each of B equal strata, uniform within the stratum. The strata are assigned to rows at
    random, so that every row's u is uniform and its bound does not depend on its row in the batch. In double precision,
    on the generator's device. t_max can be drawn and t_min cannot: at t = 0 the weight of the bound is infinite.
    """
    rows, generator = rng.slice_of(num), rng.generator
    below = BatchRng(generator).uniform((rows.total,), generator.device).double()
    strata = torch.randperm(rows.total, generator=generator, device=generator.device) + 1
    share = (strata - below) / rows.total if antithetic else 1 - below
    return t_min + (t_max - t_min) * rows.of(share, num) ** power


def importance_weight(t: Tensor, t_min: float, power: float, t_max: float = 1.0) -> Tensor:
    """The uniform density on (t_min, t_max] over that of `draw_times`, at its times t."""
    return power * ((t - t_min) / (t_max - t_min)) ** (1 - 1 / power)


def draw_grid_times(num: int, steps: int, rng: BatchRng, antithetic: bool = True) -> tuple[Tensor, Tensor]:
    """B steps (t, s = t - 1/T) of the grid {1/T, ..., 1}, each step equally likely."""
    index = torch.ceil(draw_times(num, rng, antithetic=antithetic) * steps)
    return index / steps, (index - 1) / steps


def grid(steps: int, t_end: float = 0.0) -> Tensor:
    """T + 1 equally spaced times from 1 down to t_end, in double precision."""
    return torch.linspace(1, t_end, steps + 1, dtype=torch.float64)
