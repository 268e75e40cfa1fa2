"""A transformer trunk with frozen weights, arranged for speed, and its attention. Independent of vocabularies and KV
caches.

Differences from `transformer.Trunk`, none of which changes the result: the scale of adaLN is folded into the weight of
the norm and, with shifts and gates, computed once for all blocks (without time conditioning, once for all calls); the
two halves of a query or key that rotate against each other are stored side by side, so that a rotation is one complex
product; the residual stream stays in float32 or better, as autocast leaves it in training, while matrix products run in
`dtype`.

Shapes: B sequences, L tokens, d wide, H heads of w = d / H each, n blocks and 2n + 1 norms, c the width of the
condition, M modulations: 1 for all sequences, or B.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import Norm, add_norm_, apply_rotary_, widen
from adlm.inference.single_row import add_product_, is_single_row, normed_product
from adlm.models.layers import Block, rotary_angles
from adlm.models.transformer import Trunk, attendable


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


Attend = Callable[[int, Tensor], Tensor]
"""(number of the block, qkv (B, L, 3, H, d / H)) -> what attention mixes, (B, L, d). It may write over qkv."""


def precise(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def kept(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own: the network may go, or train on."""
    return weight.detach().to(dtype, copy=True)


def blocks_of(trunk: Trunk) -> list[Block]:
    return [block for block in trunk.blocks if isinstance(block, Block)]


@dataclass(frozen=True)
class FrozenBlock:
    """The products of a block."""

    qkv: Tensor
    out: Tensor
    widen: Tensor
    widen_bias: Tensor
    narrow: Tensor
    narrow_bias: Tensor

    @classmethod
    def of(cls, block: Block, dtype: torch.dtype) -> "FrozenBlock":
        mlp = (block.widen.weight, block.widen.bias, block.narrow.weight, block.narrow.bias)
        return cls(
            kept(_side_by_side(block), dtype),
            kept(block.out.weight, dtype),
            *(kept(weight, dtype) for weight in mlp),
        )


def _side_by_side(block: Block) -> Tensor:
    """The rows of qkv (3 d, d), those of queries and keys in the order 0, w/2, 1, w/2 + 1, .. of a head of width w.

    Queries and keys are reordered alike, so their products are the same.
    """
    qk, v = block.qkv.weight.tensor_split([2 * block.out.in_features])
    halves = qk.reshape(2 * block.heads, 2, -1, qk.shape[1])
    return torch.cat([halves.transpose(1, 2).reshape(qk.shape), v])


class Modulation:
    """sigma (M,) -> the 2n + 1 norms of a trunk. Told nothing, it answers from memory what it says of 0."""

    def __init__(self, trunk: Trunk, dtype: torch.dtype):
        norms = [norm.weight for block in blocks_of(trunk) for norm in (block.norm1, block.norm2)]
        self.weight = kept(torch.stack([*norms, trunk.norm.weight]), dtype)  # (2n + 1, d)
        self.condition = None
        if trunk.condition is not None:
            self.condition = copy.deepcopy(trunk.condition).to(dtype)
            layers = [*(block.modulation for block in blocks_of(trunk)), trunk.modulation]
            modulations = [layer for layer in layers if layer is not None]
            self.to_parts = kept(torch.cat([layer.weight for layer in modulations]), dtype)  # ((6n + 2) d, c)
            self.to_parts_bias = kept(torch.cat([layer.bias for layer in modulations]), dtype)
        self.unmoved = self._norms(self.weight.new_zeros(1))

    def __call__(self, sigma: Tensor | None) -> list[Norm]:
        return self.unmoved if sigma is None or self.condition is None else self._norms(sigma.to(self.weight.dtype))

    def _norms(self, sigma: Tensor) -> list[Norm]:
        weight = self.weight[:, None]
        none = torch.zeros_like(weight)
        if self.condition is None:
            return [Norm(*parts) for parts in zip(none + 1, weight, none, strict=True)]
        parts = F.linear(self.condition(sigma), self.to_parts, self.to_parts_bias)
        parts = parts.view(len(sigma), -1, self.weight.shape[1]).transpose(0, 1).contiguous()  # (6n + 2, M, d)
        shifts, scales, gates = parts[0::3], parts[1::3], parts[2::3]
        gates = torch.cat([gates[:1], gates])  # nothing is added before the first norm
        return [Norm(*parts) for parts in zip(gates, weight * (1 + scales), shifts, strict=True)]


class FrozenTrunk:
    """Embedded tokens (B, L, d) -> final hidden states (B, L, d)."""

    def __init__(self, trunk: Trunk, dtype: torch.dtype):
        self.dtype = dtype
        blocks = blocks_of(trunk)
        self.heads, self.causal = blocks[0].heads, blocks[0].causal
        self.modulation = Modulation(trunk, precise(dtype))
        self.blocks = [FrozenBlock.of(block, dtype) for block in blocks]

    def __call__(self, h: Tensor, attend: Attend, sigma: Tensor | None = None) -> Tensor:
        """h, in float32 or better, is written over."""
        first, *norms = self.modulation(sigma)
        if is_single_row(h):
            return self._one_row(h, attend, [first, *norms])
        normed = add_norm_(h, None, first, self.dtype)
        for number, block in enumerate(self.blocks):
            qkv = F.linear(normed, block.qkv).view(*h.shape[:2], 3, self.heads, -1)
            mixed = F.linear(attend(number, qkv), block.out)
            normed = add_norm_(h, mixed, norms[2 * number], self.dtype)
            wide = widen(normed, block.widen, block.widen_bias)
            thought = F.linear(wide, block.narrow, block.narrow_bias)
            normed = add_norm_(h, thought, norms[2 * number + 1], self.dtype)
        return normed

    def _one_row(self, h: Tensor, attend: Attend, norms: list[Norm]) -> Tensor:
        """The same, where every product has its norm before it or its sum after it."""
        for number, block in enumerate(self.blocks):
            before_attention, before_mlp, after = norms[2 * number : 2 * number + 3]
            qkv = normed_product(h, before_attention, block.qkv).view(*h.shape[:2], 3, self.heads, -1)
            add_product_(h, attend(number, qkv), block.out, None, before_mlp.gate)
            wide = normed_product(h, before_mlp, block.widen, block.widen_bias, gelu=True)
            add_product_(h, wide, block.narrow, block.narrow_bias, after.gate)
        return add_norm_(h, None, norms[-1], self.dtype)
