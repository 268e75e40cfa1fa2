"""Logits -> a distribution over clean tokens that respects what is already known. Knows nothing of time.

Shapes: B sequences, L tokens each, V symbols (the mask is one of them).
"""

import torch
from torch import Tensor


def subs(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """log beliefs (B, L, V): no mass on the mask, and a visible token is copied (SUBS).

    Impossible symbols are at -inf, not at a large negative number: their probability is zero.
    """
    wanted = torch.float64 if logits.dtype == torch.float64 else torch.float32
    without_mask = logits.to(wanted).index_fill(-1, torch.tensor(mask_id, device=logits.device), -torch.inf)
    guessed = torch.log_softmax(without_mask, dim=-1)
    copied = torch.full_like(guessed, -torch.inf).scatter(-1, z[..., None], 0.0)
    return torch.where((z == mask_id)[..., None], guessed, copied)
