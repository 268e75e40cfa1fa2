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
    return log_softmax(without_mask)


def log_softmax(logits: Tensor) -> Tensor:
    """torch.log_softmax over the last dimension, with the sum in float64.

    A row's result should then not depend on its index. In float32 its last bit can on CUDA, where the order in which
    PyTorch adds depends on the alignment of the row in memory, and so on its index if V is not a multiple of 4.
    """
    shifted = logits - logits.detach().amax(dim=-1, keepdim=True)
    return shifted - shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log().to(logits.dtype)


def subs(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """log beliefs (B, L, V): no mass on the mask, and a visible token is copied (SUBS)."""
    guessed = clean_log_beliefs(logits, mask_id)
    copied = torch.full_like(guessed, -torch.inf).scatter(-1, z[..., None], 0.0)
    return torch.where((z == mask_id)[..., None], guessed, copied)
