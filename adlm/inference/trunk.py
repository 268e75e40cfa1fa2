"""A transformer trunk with frozen weights, arranged for speed, and its attention. Independent of vocabularies and KV
caches.

Differences from `transformer.Trunk`, none of which changes the result: the scale of adaLN is folded into the weight of
the norm and, with shifts and gates, computed once for all blocks (without time conditioning, once for all calls); the
two halves of a query or key that rotate against each other are stored side by side, so that a rotation is one complex
product; the residual stream stays in float32 or float64, as under autocast in training, while matrix products run in
`dtype`.

Queries, keys and values are one tensor qkv (B, L, H + 2 K, w): H query heads, K key heads, K value heads.

Shapes: B sequences, L tokens, d wide, H query heads and K key and value heads of w = d / H each, n blocks and 2n + 1
norms, c the width of the condition, M modulations: 1 for all sequences, or B.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.inference.fused_ops import (
    Activation,
    Norm,
    add_norm_,
    add_product_,
    apply_rotary_,
    is_single_row,
    linear_gelu,
    linear_swiglu,
    normed_product,
    split_heads,
)
from adlm.models.gpt2 import Gpt2Block
from adlm.models.layers import RMSNorm, rms_norm, rotary_angles, self_attention
from adlm.models.llama import LlamaBlock
from adlm.models.transformer import Block, TimeCondition, Trunk, attendable


class RotaryTable:
    """Rotary embedding as complex numbers of modulus 1, one per position and pair of coordinates: (L, w / 2).

    Table lengths are powers of two. A table is never reallocated, because captured CUDA graphs hold its address.
    """

    def __init__(self, head_width: int, like: Tensor, base: float | None):
        """Without a base nothing is rotated."""
        self.head_width, self.like, self.base, self.tables = head_width, like, base, dict[int, Tensor]()

    def __call__(self, length: int) -> Tensor:
        size = 1 << (length - 1).bit_length()
        if size not in self.tables:
            zeros = torch.zeros(size, device=self.like.device)
            angles = rotary_angles(size if self.base else zeros, self.head_width, self.like, self.base or 1)
            self.tables[size] = torch.complex(*angles)
        return self.tables[size][:length]


def attention_mask(pad: Tensor, causal: bool) -> Tensor:
    """Attention mask from padding pad (B, L) and causality: (B, 1, L or 1, L), True where a key may be attended to."""
    if not causal:
        return attendable(pad)
    before = torch.ones(pad.shape[1], pad.shape[1], dtype=torch.bool, device=pad.device).tril()
    return attendable(pad) & before | torch.eye(pad.shape[1], dtype=torch.bool, device=pad.device)


def attention(qkv: Tensor, rotary: Tensor, visible: Tensor | None, causal: bool, kv_heads: int) -> Tensor:
    """Self-attention of qkv (B, L, H + 2 K, w) over the visible tokens, causal or not: (B, L, H w)."""
    apply_rotary_(qkv, rotary, kv_heads)
    q, k, v = (part.transpose(1, 2) for part in split_heads(qkv, kv_heads))
    return self_attention(q, k, v, visible, causal and visible is None)  # the mask is causal itself


Attend = Callable[[int, Tensor], Tensor]
"""(index of the block, qkv (B, L, H + 2 K, w)) -> attention output (B, L, d). It may overwrite qkv."""


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def frozen_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached copy in `dtype`, independent of later changes to the network."""
    return weight.detach().to(dtype, copy=True)


def blocks_of(trunk: Trunk) -> list[Block | LlamaBlock | Gpt2Block]:
    return [block for block in trunk.blocks if isinstance(block, Block | LlamaBlock | Gpt2Block)]


@dataclass(frozen=True)
class FrozenBlock:
    """The weights of a block's matrix products."""

    kv_heads: int
    qkv: Tensor
    """(H + 2 K) w rows."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """(2 H, w), in float32 or float64; None without normalisation of queries and keys."""
    out: Tensor
    out_bias: Tensor | None
    mlp_in: Tensor
    """Of a gated MLP, the rows of the gate and below them the others."""
    mlp_in_bias: Tensor | None
    """None for a gated MLP (SwiGLU), which has no biases; others have GELU."""
    mlp_out: Tensor
    mlp_out_bias: Tensor | None

    @classmethod
    def of(cls, block: Block | LlamaBlock | Gpt2Block, dtype: torch.dtype) -> "FrozenBlock":
        kv_heads, mlp_in, qkv_bias, qk_norm = block.heads, block.widen.weight, None, None
        if isinstance(block, LlamaBlock):
            kv_heads, mlp_in = block.kv_heads, torch.cat([block.gate.weight, block.widen.weight])
        if isinstance(block, Block):
            qkv = block.qkv.weight
            if block.query_norm is not None and block.key_norm is not None:
                norms = _interleaved(torch.stack([block.query_norm, block.key_norm]))
                qk_norm = frozen_copy(norms.repeat_interleave(block.heads, dim=0), full_precision(dtype))
        else:
            qkv = torch.cat([block.query.weight, block.key.weight, block.value.weight])
            if block.query.bias is not None:
                biases = torch.cat([block.query.bias, block.key.bias, block.value.bias])
                qkv_bias = frozen_copy(_interleaved_qkv(biases, block.heads, kv_heads), dtype)
        out_bias, mlp_in_bias, mlp_out_bias = (
            None if layer.bias is None else frozen_copy(layer.bias, dtype)
            for layer in (block.out, block.widen, block.narrow)
        )
        return cls(
            kv_heads,
            frozen_copy(_interleaved_qkv(qkv, block.heads, kv_heads), dtype),
            qkv_bias,
            qk_norm,
            frozen_copy(block.out.weight, dtype),
            out_bias,
            frozen_copy(mlp_in, dtype),
            mlp_in_bias,
            frozen_copy(block.narrow.weight, dtype),
            mlp_out_bias,
        )

    def split(self, qkv: Tensor, heads: int) -> Tensor:
        """(B, L, H + 2 K, w) from the product, queries and keys normalised if they are in the network."""
        qkv = qkv.view(*qkv.shape[:2], heads + 2 * self.kv_heads, -1)
        if self.qk_norm is not None:
            qkv[:, :, : 2 * heads] = rms_norm(qkv[:, :, : 2 * heads], self.qk_norm)
        return qkv


def _interleaved_qkv(rows: Tensor, heads: int, kv_heads: int) -> Tensor:
    """qkv ((H + 2 K) w, ...) with the rows of each head's queries and keys in the order 0, w/2, 1, w/2 + 1, ...

    Queries and keys are permuted alike, so their dot products are unchanged.
    """
    by_head = rows.view(heads + 2 * kv_heads, -1, *rows.shape[1:])
    qk, v = by_head.tensor_split([heads + kv_heads])
    return torch.cat([_interleaved(qk), v]).flatten(0, 1)


def _interleaved(heads: Tensor) -> Tensor:
    """(n, w, ...) with the order 0, w/2, 1, w/2 + 1, ... along its second axis."""
    return heads.view(len(heads), 2, -1, *heads.shape[2:]).transpose(1, 2).flatten(1, 2)


class Modulation:
    """sigma (M,) -> the 2n + 1 norms of a trunk. Those of sigma = 0 are precomputed and returned for None.

    `condition` is that of the trunk that this one continues, if it does.
    """

    def __init__(self, trunk: Trunk, dtype: torch.dtype, condition: TimeCondition | None = None):
        self.epsilon = trunk.norm.epsilon if isinstance(trunk.norm, RMSNorm) else None
        norms = [norm for block in blocks_of(trunk) for norm in (block.norm1, block.norm2)] + [trunk.norm]
        self.weight = frozen_copy(torch.stack([norm.weight for norm in norms]), dtype)  # (2n + 1, d)
        biases = [norm.bias.detach() for norm in norms if isinstance(norm, nn.LayerNorm)]
        self.bias = frozen_copy(torch.stack(biases), dtype) if biases else torch.zeros_like(self.weight)
        self.condition = None
        if (own := trunk.condition or condition) is not None:
            self.condition = copy.deepcopy(own).to(dtype)
            blocks = [block for block in blocks_of(trunk) if isinstance(block, Block)]
            layers = [*(block.modulation for block in blocks), trunk.modulation]
            modulations = [layer for layer in layers if layer is not None]
            self.to_parts = frozen_copy(torch.cat([layer.weight for layer in modulations]), dtype)  # ((6n + 2) d, c)
            self.to_parts_bias = frozen_copy(torch.cat([layer.bias for layer in modulations]), dtype)
        self.norms_at_zero = self._norms(self.weight.new_zeros(1))

    def __call__(self, sigma: Tensor | None) -> list[Norm]:
        return (
            self.norms_at_zero if sigma is None or self.condition is None else self._norms(sigma.to(self.weight.dtype))
        )

    def _norms(self, sigma: Tensor) -> list[Norm]:
        weight, bias = self.weight[:, None], self.bias[:, None]
        if self.condition is None:
            return [Norm(*parts, self.epsilon) for parts in zip(torch.ones_like(weight), weight, bias, strict=True)]
        parts = F.linear(self.condition(sigma), self.to_parts, self.to_parts_bias)
        parts = parts.view(len(sigma), -1, self.weight.shape[1]).transpose(0, 1).contiguous()  # (6n + 2, M, d)
        shifts, scales, gates = parts[0::3], parts[1::3], parts[2::3]
        gates = torch.cat([gates[:1], gates])  # the first is unused: nothing is added before the first norm
        return [Norm(*parts) for parts in zip(gates, weight * (1 + scales), shifts, strict=True)]


class FrozenTrunk:
    """Embedded tokens (B, L, d) -> final hidden states (B, L, d)."""

    def __init__(self, trunk: Trunk, dtype: torch.dtype, condition: TimeCondition | None = None):
        self.dtype = dtype
        blocks = blocks_of(trunk)
        self.heads, self.causal = blocks[0].heads, blocks[0].causal
        self.modulation = Modulation(trunk, full_precision(dtype), condition)
        self.blocks = [FrozenBlock.of(block, dtype) for block in blocks]
        self.kv_heads = self.blocks[0].kv_heads
        self.positions = None
        if trunk.positions is not None:
            self.positions = frozen_copy(trunk.positions.weight, full_precision(dtype))

    def __call__(self, h: Tensor, positions: Tensor, attend: Attend, sigma: Tensor | None = None) -> Tensor:
        """h, in float32 or float64, is overwritten by the residual stream after the last block.

        `positions`, (L,) or (B, L), matter to networks that learn them; drafts past the last one are discarded later.
        """
        if self.positions is not None:
            h += F.embedding(positions.clamp(max=len(self.positions) - 1), self.positions)
        first, *norms = self.modulation(sigma)
        if is_single_row(h):
            return self._forward_single_row(h, attend, [first, *norms])
        normed = add_norm_(h, None, first, self.dtype)
        for number, block in enumerate(self.blocks):
            qkv = block.split(F.linear(normed, block.qkv, block.qkv_bias), self.heads)
            mixed = F.linear(attend(number, qkv), block.out, block.out_bias)
            normed = add_norm_(h, mixed, norms[2 * number], self.dtype)
            if block.mlp_in_bias is None:
                inner = linear_swiglu(normed, block.mlp_in)
            else:
                inner = linear_gelu(normed, block.mlp_in, block.mlp_in_bias)
            mixed = F.linear(inner, block.mlp_out, block.mlp_out_bias)
            normed = add_norm_(h, mixed, norms[2 * number + 1], self.dtype)
        return normed

    def _forward_single_row(self, h: Tensor, attend: Attend, norms: list[Norm]) -> Tensor:
        """The same with each product fused with the norm before it or the addition after it."""
        for number, block in enumerate(self.blocks):
            before_attention, before_mlp, after = norms[2 * number : 2 * number + 3]
            qkv = block.split(normed_product(h, before_attention, block.qkv, block.qkv_bias), self.heads)
            add_product_(h, attend(number, qkv), block.out, block.out_bias, before_mlp.gate)
            activation: Activation = "swiglu" if block.mlp_in_bias is None else "gelu"
            inner = normed_product(h, before_mlp, block.mlp_in, block.mlp_in_bias, activation)
            add_product_(h, inner, block.mlp_out, block.mlp_out_bias, after.gate)
        return add_norm_(h, None, norms[-1], self.dtype)
