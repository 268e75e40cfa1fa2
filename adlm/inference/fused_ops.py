"""What stands between the matrix products of a frozen block, each in as few passes as can be. Knows no weights' names.

On CUDA, Triton kernels do each in one pass; elsewhere, and as their oracles, the plain forms run. `h` is the residual
stream, in float32 or better; everything else is in the width of the products.

Shapes: B sequences, L tokens, d wide, H heads of w each, M modulations: 1 for all sequences, or B; C places in a cache.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adlm.models.logit_gradients import why_no_triton

FEW_TOKENS = 2048  # a token is shared by more threads than otherwise, which then wait for each other
PLACES_TOGETHER = 128  # of a cache; a GPU has more processors than a token has heads, so each head's work is split


@dataclass(frozen=True)
class Norm:
    """One norm of a trunk and the gate before it, each (M, d), in float32 or better."""

    gate: Tensor
    """What is added to the residual stream before this norm is multiplied by it."""
    weight: Tensor
    """The norm's own weight times adaLN's 1 + scale."""
    shift: Tensor


def by_kernel(tensor: Tensor) -> bool:
    """Whether the Triton kernels run on it."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and not why_no_triton()


def add_norm_(h: Tensor, added: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    """h (B, L, d) becomes h + gate * added; returns LayerNorm(h) * weight + shift in `dtype`."""
    if not by_kernel(h):
        return plain_add_norm_(h, added, norm, dtype)
    from adlm.inference.fused_kernels import add_norm_kernel  # Triton is imported where it runs

    batch, length, width = h.shape
    normed = torch.empty_like(h, dtype=dtype)
    with torch.cuda.device(h.device):
        add_norm_kernel[(batch * length,)](
            h,
            h if added is None else added,
            norm.gate,
            norm.weight,
            norm.shift,
            normed,
            length,
            width,
            width if len(norm.weight) > 1 else 0,
            added is not None,
            power_of_two(width),
            num_warps=4 if batch * length <= FEW_TOKENS else 1,
        )
    return normed


def plain_add_norm_(h: Tensor, added: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    if added is not None:
        h.addcmul_(norm.gate[:, None], added.to(h.dtype))
    if len(norm.weight) == 1:
        return F.layer_norm(h, h.shape[-1:], norm.weight[0], norm.shift[0], eps=1e-5).to(dtype)
    plain = F.layer_norm(h, h.shape[-1:], eps=1e-5)
    return torch.addcmul(norm.shift[:, None], plain, norm.weight[:, None]).to(dtype)


def apply_rotary_(qkv: Tensor, turns: Tensor) -> None:
    """Rotary positions, in place, of the queries and keys of qkv (B, L, 3, H, w).

    Coordinates 2i and 2i + 1 are one complex number, multiplied by turns (L, w / 2), of length 1.
    """
    if not by_kernel(qkv):
        plain_apply_rotary_(qkv, turns)
        return
    from adlm.inference.fused_kernels import rotary_kernel

    batch, length, _, heads, width = qkv.shape
    with torch.cuda.device(qkv.device):
        rotary_kernel[(batch * length,)](
            qkv, torch.view_as_real(turns), length, heads, width, power_of_two(2 * heads), power_of_two(width)
        )


def plain_apply_rotary_(qkv: Tensor, turns: Tensor) -> None:
    qk = qkv[:, :, :2]
    pairs = qk.view(*qk.shape[:-1], -1, 2)
    precise = torch.view_as_complex(pairs.to(turns.real.dtype)).mul_(turns[:, None, None])
    if qkv.dtype != turns.real.dtype:
        pairs.copy_(torch.view_as_real(precise))


def attend_one_token(
    qkv: Tensor, turns: Tensor, keys: Tensor, values: Tensor, position: Tensor, arrivals: Tensor
) -> Tensor:
    """What the next n tokens, qkv (B, n, 3, H, w), see of all before them and of themselves, (B, n, H w).

    The first of them stands at `position` (1,). Their keys and values are written to their places in keys and values
    (B, H, C, w). turns (C, w / 2) are those of all places. arrivals (B, H), int32, are 0 before and after.
    """
    if qkv.shape[1] > 1 or not by_kernel(qkv):
        return plain_attend_one_token(qkv, turns, keys, values, position)
    from adlm.inference.fused_kernels import attend_one_token_kernel

    batch, _, _, heads, width = qkv.shape
    num_parts = -(-keys.shape[2] // PLACES_TOGETHER)
    parts = torch.empty(batch, heads, num_parts, width, device=qkv.device)
    sums = torch.empty(batch, heads, num_parts, 2, device=qkv.device)
    mixed = qkv.new_empty(batch, 1, heads * width)
    early = starts_early(qkv.device)
    with torch.cuda.device(qkv.device):
        attend_one_token_kernel[(batch, heads, num_parts)](
            qkv,
            torch.view_as_real(turns),
            keys,
            values,
            position,
            parts,
            sums,
            arrivals,
            mixed,
            heads,
            keys.shape[2],
            width,
            width**-0.5,
            power_of_two(width),
            PLACES_TOGETHER,
            power_of_two(num_parts),
            early,
            launch_pdl=early,
        )
    return mixed


def plain_attend_one_token(qkv: Tensor, turns: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    places = position + torch.arange(qkv.shape[1], device=qkv.device)
    apply_rotary_(qkv, turns[places])
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    keys.index_copy_(2, places, k)
    values.index_copy_(2, places, v)
    seen = torch.arange(keys.shape[2], device=qkv.device) <= places[:, None]
    # cuDNN, which torch prefers, would plan for every length of prompt anew: a tenth of a second each.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if qkv.is_cuda else nullcontext():
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
    return mixed.transpose(1, 2).flatten(-2)


def widen(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(W h + b), gelu by its tanh form: on CUDA inside the product."""
    if not h.is_cuda or h.dtype == torch.float64:
        return F.gelu(F.linear(h, weight, bias), approximate="tanh")
    wide = torch._addmm_activation(bias, h.flatten(0, -2), weight.T, use_gelu=True)
    return wide.view(*h.shape[:-1], -1)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may load what it needs while the one before it still runs: from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()
