"""Positions, padding and attention of frozen networks. Knows nothing of weights or caches.

Shapes: B sequences, L tokens, H heads of w each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import apply_rotary_
from adlm.models.layers import rotary_angles
from adlm.models.transformer import attendable


class RotaryTable:
    """Position -> one complex number of length 1 for every pair of a head's coordinates, (L, w / 2).

    Tables are as long as a power of two and stay where they are: a recorded CUDA graph may read one.
    """

    def __init__(self, head_width: int, like: Tensor):
        self.head_width, self.like, self.tables = head_width, like, dict[int, Tensor]()

    def __call__(self, length: int) -> Tensor:
        size = 1 << (length - 1).bit_length()
        if size not in self.tables:
            self.tables[size] = torch.complex(*rotary_angles(size, self.head_width, self.like))
        return self.tables[size][:length]


def attention_mask(pad: Tensor, causal: bool) -> Tensor:
    """Which tokens each may attend to, by padding pad (B, L) and order: (B, 1, L or 1, L)."""
    if not causal:
        return attendable(pad)
    return attendable(pad) & torch.ones(pad.shape[1], pad.shape[1], dtype=torch.bool, device=pad.device).tril()


def attention(qkv: Tensor, turns: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """Every token (of qkv (B, L, 3, H, w)) to every token, or every earlier one, that is visible: (B, L, H w)."""
    apply_rotary_(qkv, turns)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal and visible is None)
    return mixed.transpose(1, 2).flatten(-2)
