"""What the blocks of both families are made of: norms, the rotary embedding, attention.

Shapes: B sequences, L tokens, d wide, H query heads and K key and value heads of w each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0  # of the published networks


class LayerNorm(nn.Module):
    """LayerNorm with a weight and no bias, computed in float32 or float64 even under autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        precise = h if h.dtype == torch.float64 else h.float()
        return F.layer_norm(precise, self.weight.shape, eps=1e-5).to(self.weight.dtype) * self.weight


class RMSNorm(nn.Module):
    """RMSNorm with a weight, computed in float32 or float64 even under autocast."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        return rms_norm(h, self.weight, self.epsilon)


def rotary_angles(
    positions: int | Tensor, head_width: int, like: Tensor, base: float = ROTARY_BASE
) -> tuple[Tensor, Tensor]:
    """cos and sin (L, head_width / 2) of position * base^(-2i / head_width), in float32 or float64.

    `positions` are L whole numbers, or L itself for 0 to L - 1.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(positions, int):
        positions = torch.arange(positions, device=like.device)
    angles = torch.outer(positions.to(dtype), rotary_frequencies(head_width, like.device, dtype, base))
    return angles.cos(), angles.sin()


def rotary_frequencies(
    head_width: int,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    base: float = ROTARY_BASE,
) -> Tensor:
    """base^(-2i / head_width), (head_width / 2,), in radians per token."""
    return base ** (-torch.arange(0, head_width, 2, device=device, dtype=dtype) / head_width)


def apply_rotary(q: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding: rotates coordinates i and i + head_width / 2 of q (..., head_width) by the same angle.

    cos and sin broadcast over q: (L, head_width / 2) for q (B, H, L, head_width).
    """
    cos, sin = angles
    first, second = q.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(q.dtype)


def rms_norm(q: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """q (..., w) with a root mean square of 1, times weight (w,) or (..., w); computed in float32 or float64."""
    precise = q if q.dtype == torch.float64 else q.float()
    return (F.rms_norm(precise, q.shape[-1:], eps=epsilon) * weight).to(q.dtype)


def self_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """(B, L, H w) from q (B, H, L, w), k and v (B, K, L, w); `visible` is a mask of attendable keys.

    With K < H, H / K adjacent query heads share a key and value head. These are repeated here: only some of PyTorch's
    attention kernels can share them, and none of those that take a mask.
    """
    if visible is not None and causal:
        before = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        itself = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)  # padding on the left sees nothing else
        visible = visible & before | itself
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal and visible is None)
    return mixed.transpose(1, 2).flatten(-2)
