"""What stands between the matrix products of a frozen block, each in as few passes as can be. Knows no weights' names.

`h` is the residual stream, in float32 or better; everything else is in the width of the products.

Shapes: B sequences, L tokens, d wide, H heads of d / H each, M modulations: 1 for all sequences, or B.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """One norm of a trunk and the gate before it, each (M, d), in float32 or better."""

    gate: Tensor
    """What is added to the residual stream before this norm is multiplied by it."""
    weight: Tensor
    """The norm's own weight times adaLN's 1 + scale."""
    shift: Tensor


def add_norm_(h: Tensor, added: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    """h (B, L, d) becomes h + gate * added; returns LayerNorm(h) * weight + shift in `dtype`."""
    if added is not None:
        h.addcmul_(norm.gate[:, None], added.to(h.dtype))
    if len(norm.weight) == 1:
        return F.layer_norm(h, h.shape[-1:], norm.weight[0], norm.shift[0], eps=1e-5).to(dtype)
    plain = F.layer_norm(h, h.shape[-1:], eps=1e-5)
    return torch.addcmul(norm.shift[:, None], plain, norm.weight[:, None]).to(dtype)


def turn_(qk: Tensor, turns: Tensor) -> None:
    """Rotary positions in place: coordinates 2i and 2i + 1 of qk (B, L, .., H, d / H) are one complex number,
    multiplied by turns (L, d / H / 2) of length 1."""
    turns = turns.view(len(turns), *(1 for _ in qk.shape[2:-1]), -1)
    pairs = qk.view(*qk.shape[:-1], -1, 2)
    if qk.dtype == torch.view_as_real(turns).dtype:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        precise = torch.view_as_complex(pairs.to(turns.real.dtype))
        pairs.copy_(torch.view_as_real(precise.mul_(turns)))


def widen(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(W h + b), gelu by its tanh form."""
    return F.gelu(F.linear(h, weight, bias), approximate="tanh")
