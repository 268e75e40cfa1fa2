"""A trunk whose weights no longer change, arranged for speed. Knows nothing of vocabularies, caches or devices.

What differs from `transformer.Trunk`, none of it in the result: adaLN's scale is multiplied into the norm's weight and,
with its shift and gates, computed once for all blocks, and for a network that is not told the noise once and for all;
a query's and key's halves that rotate against each other lie side by side, so that a rotation is one complex product;
the residual stream stays in float32 or better, as autocast leaves it in training, the products run in `dtype`.

Shapes: B sequences, L tokens, d wide, H heads of d / H each, n blocks and 2n + 1 norms, c the width of the condition,
M modulations: 1 for all sequences, or B.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import Norm, add_norm_, widen
from adlm.inference.single_row import add_product_, is_single_row, normed_product
from adlm.models.layers import Block
from adlm.models.transformer import Trunk

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
