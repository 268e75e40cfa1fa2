"""Exact categorical draws. Knows nothing of what is drawn.

Shapes: any leading shape, V symbols last.
"""

import torch
from torch import Tensor


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One symbol from each distribution, by inverting its cumulative sum in double precision.

    A symbol of probability zero is never drawn. Gumbel noise in float32, the usual shortcut, cannot reach the tail of
    its distribution and so sharpens every categorical a little; a uniform number of 53 bits does not.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    whole = cumulative[..., -1:]
    point = torch.rand(whole.shape, generator=generator, device=generator.device, dtype=torch.float64)
    index = torch.searchsorted(cumulative, point.to(cumulative.device) * whole, right=True)
    last_possible = (cumulative < whole).sum(dim=-1, keepdim=True)  # where rounding carries the point to the very end
    return torch.minimum(index, last_possible)[..., 0]
