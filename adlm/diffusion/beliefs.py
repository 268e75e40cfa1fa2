"""Logits -> SUBS beliefs, distributions over clean tokens. Does not depend on time.

Shapes: B sequences, L tokens each, V symbols (the mask is one of them).
"""

import torch
from torch import Tensor


def clean_log_beliefs(logits: Tensor, mask_id: int) -> Tensor:
    """Log softmax (..., V) over all symbols except the mask, in float32 or float64.

    The mask is at -inf, not at a large negative number: its probability is zero.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    without_mask = logits.to(dtype, copy=True)
    without_mask[..., mask_id].fill_(
        -torch.inf
    )  # assigning a Python number by index would make the host wait for a GPU
    return torch.log_softmax(without_mask, dim=-1)


def subs(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """log beliefs (B, L, V): no mass on the mask, and a visible token is copied (SUBS)."""
    guessed = clean_log_beliefs(logits, mask_id)
    copied = torch.full_like(guessed, -torch.inf).scatter(-1, z[..., None], 0.0)
    return torch.where((z == mask_id)[..., None], guessed, copied)
