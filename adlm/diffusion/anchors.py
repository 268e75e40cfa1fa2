"""Which tokens are anchors. Does not depend on how they are used.

Shapes: B sequences, L tokens each, V symbols.
"""

import torch
from torch import Tensor

from adlm.errors import UserError


def anchor_mask(x: Tensor, tau: int, num_symbols: int, pad: Tensor | None = None) -> Tensor:
    """True where a token's id occurs at most tau times in its own sequence, (B, L).

    Counted on the device in one pass, (B, V) integers. Padding (True in `pad`) is neither counted nor an anchor.
    """
    if tau < 0:
        raise UserError(f"anchor.tau {tau} must be at least 0: a token cannot occur fewer times than that")
    present = torch.ones_like(x) if pad is None else (~pad).to(x.dtype)
    counts = torch.zeros(x.shape[0], num_symbols, dtype=x.dtype, device=x.device).scatter_add(1, x, present)
    rare = counts.gather(1, x) <= tau
    return rare if pad is None else rare & ~pad
