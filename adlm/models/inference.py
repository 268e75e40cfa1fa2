"""The same networks when their weights no longer change: what sampling runs on. Knows no sampling and no time grids.

A Frozen network holds copies of its own: the network it came from may go, or train on. Hidden states come first and
logits only for the rows that are asked for. Its answers are the network's, in evaluation, up to rounding.

Shapes: B sequences, L tokens, d wide, V symbols, N rows of hidden states, n tokens read at once.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.models.anchored import AnchoredTransformer, Denoiser, LogitsBridge, MixtureBridge
from adlm.models.attending import Cache, Turns, attend_all, attend_cached, visible_to
from adlm.models.frozen_trunk import FrozenTrunk, kept, precise
from adlm.models.heads import LOGITS_AT_ONCE
from adlm.models.transformer import Transformer


@dataclass(frozen=True)
class Hidden:
    """Final hidden states, in the width of the products."""

    last: Tensor
    """(B, L, d), what the head reads; the second network's, where there is one."""
    anchor: Tensor | None
    """(B, L, d), what the anchor head reads; `last` in a pair without a second network, None without a pair."""


class FrozenHead:
    """Rows (N, d) -> logits (N, V) in float32 or better, the product in `dtype`."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype):
        self.weight, self.bias = kept(head.weight, dtype), kept(head.bias, precise(dtype))

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows @ self.weight.T).to(self.bias.dtype) + self.bias


class FrozenBridge:
    """Hidden states of the anchor network -> what the second one reads, in float32 or better.

    The logits bridge and the anchor head before it are one map of d x d, formed in float32 or better.
    """

    def __init__(self, denoiser: Denoiser, head: nn.Linear, dtype: torch.dtype):
        bridge = denoiser.bridge
        self.table = None
        if isinstance(bridge, MixtureBridge):
            self.table = kept(bridge.table, dtype)
            return
        weight, bias = bridge.weight.detach(), bridge.bias.detach()
        if isinstance(bridge, LogitsBridge):
            wide = weight.to(precise(dtype))
            bias = wide @ head.bias.detach().to(wide) + bias
            weight = wide @ head.weight.detach().to(wide)
        self.weight, self.bias = kept(weight, dtype), kept(bias, dtype)

    def __call__(self, hidden: Tensor, head: FrozenHead) -> Tensor:
        if self.table is None:
            return F.linear(hidden, self.weight, self.bias).to(precise(hidden.dtype))
        chunks = torch.split(hidden.flatten(0, 1), max(1, LOGITS_AT_ONCE // len(self.table)))
        mixed = [head(rows).softmax(dim=-1).to(self.table) @ self.table for rows in chunks]
        return torch.cat(mixed).view_as(hidden).to(precise(hidden.dtype))


class Frozen:
    """A network to sample from.

    `dtype` is that of weights and products: unless given, bfloat16 on CUDA, elsewhere the network's own.
    """

    @torch.no_grad()
    def __init__(self, network: Transformer | AnchoredTransformer, dtype: torch.dtype | None = None):
        first = network if isinstance(network, Transformer) else network.anchor
        like = first.embedding.weight
        self.dtype = dtype or (torch.bfloat16 if like.is_cuda else like.dtype)
        self.embedding = kept(like, precise(self.dtype))
        self.trunk, self.head = FrozenTrunk(first.trunk, self.dtype), FrozenHead(first.head, self.dtype)
        self.turns = Turns(first.trunk.head_width, self.embedding)
        self.anchored = isinstance(network, AnchoredTransformer)
        self.bridge = None
        if isinstance(network, AnchoredTransformer) and network.denoiser is not None:
            self.bridge = FrozenBridge(network.denoiser, first.head, self.dtype)
            self.second_trunk = FrozenTrunk(network.denoiser.trunk, self.dtype)
            self.second_head = FrozenHead(network.denoiser.head, self.dtype)

    @torch.no_grad()
    def hidden(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Hidden:
        """sigma (B,) is the noise the network is told; without it every sequence is told 0. pad is True at padding."""
        turns = self.turns(z.shape[1])
        visible = None if pad is None else visible_to(pad, self.trunk.causal)

        def attend(number: int, qkv: Tensor) -> Tensor:
            return attend_all(qkv, turns, visible, self.trunk.causal)

        last = anchor = self.trunk(self._embedded(z), attend, sigma)
        if self.bridge is not None:
            last = self.second_trunk(self.bridge(anchor, self.head), attend, sigma)
        return Hidden(last, anchor if self.anchored else None)

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `Hidden.last`; in float32, or better where `dtype` is."""
        return (self.head if self.bridge is None else self.second_head)(rows)

    @torch.no_grad()
    def anchor_logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `Hidden.anchor`."""
        assert self.anchored, "a network alone has no anchor head"
        return self.head(rows)

    def cache(self, batch: int, length: int) -> Cache:
        """Room for the keys and values of `batch` rows of at most `length` tokens."""
        assert self.trunk.causal, "later tokens change earlier ones' keys: nothing can be kept"
        blocks = len(self.trunk.blocks) + (0 if self.bridge is None else len(self.second_trunk.blocks))
        like = self.trunk.blocks[0].qkv
        return Cache(blocks, batch, self.trunk.heads, length, self.turns.head_width, like)

    @torch.no_grad()
    def read(self, ids: Tensor, cache: Cache) -> Hidden:
        """Hidden states (B, n, d) of the next n tokens of every row, ids (B, n); the cache then holds n more."""
        cache.room_for(ids.shape[1])
        hidden = self._read(ids, cache)
        cache.advance(ids.shape[1])
        return hidden

    def _read(self, ids: Tensor, cache: Cache) -> Hidden:
        turns, depth = self.turns(cache.length), len(self.trunk.blocks)
        last = anchor = self.trunk(self._embedded(ids), lambda i, qkv: attend_cached(i, qkv, turns, cache))
        if self.bridge is not None:
            handed_over = self.bridge(anchor, self.head)
            last = self.second_trunk(handed_over, lambda i, qkv: attend_cached(depth + i, qkv, turns, cache))
        return Hidden(last, anchor if self.anchored else None)

    def _embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)
