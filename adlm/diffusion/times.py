"""Which times of [0, 1] a batch looks at. Knows nothing of what happens there.

Shapes: B times, one a sequence; a grid of T steps has T + 1 times, falling.
"""

import torch
from torch import Tensor


def uniform(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Numbers from [0, 1), drawn where the generator lives, so that a seed means the same on every device."""
    return torch.rand(shape, generator=generator, device=generator.device).to(device)


def draw_times(num: int, generator: torch.Generator, t_min: float = 0.0, antithetic: bool = True) -> Tensor:
    """B times from (t_min, 1]; antithetic ones lie one in each of B equal strata, each uniform in its own.

    Which row gets which stratum is drawn too, so that every row's own time is uniform: tied to its place in the batch,
    a row's bound would depend on where it stands. In double precision, where the generator lives. Time 1 can be drawn
    and time t_min cannot: at t = 0 the weight of the bound is not finite.
    """
    below = uniform((num,), generator, generator.device).double()
    strata = torch.randperm(num, generator=generator, device=generator.device) + 1
    share = (strata - below) / num if antithetic else 1 - below
    return t_min + (1 - t_min) * share


def draw_grid_times(num: int, steps: int, generator: torch.Generator, antithetic: bool = True) -> tuple[Tensor, Tensor]:
    """B steps (t, s = t - 1/T) of the grid {1/T, ..., 1}, each step equally likely."""
    index = torch.ceil(draw_times(num, generator, antithetic=antithetic) * steps)
    return index / steps, (index - 1) / steps


def grid(steps: int, t_end: float = 0.0) -> Tensor:
    """T + 1 equally spaced times from 1 down to t_end, in double precision."""
    return torch.linspace(1, t_end, steps + 1, dtype=torch.float64)
