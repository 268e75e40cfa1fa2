"""The same networks when their weights no longer change: what sampling runs on. Knows no sampling and no time grids.

A Frozen network holds copies of its own: the network it came from may go, or train on. Hidden states come first and
logits only for the rows that are asked for. Its answers are the network's, in evaluation, up to rounding.

Shapes: B sequences, L tokens, d wide, V symbols, N rows of hidden states, n tokens read at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.inference.cuda_graphs import CudaGraph, GraphCache, why_no_cuda_graphs
from adlm.inference.fused_ops import attend_one_token
from adlm.inference.single_row import precise_product
from adlm.inference.trunk import Attend, FrozenTrunk, RotaryTable, attention, attention_mask, kept, precise
from adlm.models.anchored import AnchoredTransformer, Denoiser, LogitsBridge, MixtureBridge
from adlm.models.heads import SYMBOLS_TOGETHER
from adlm.models.transformer import Transformer

Result = TypeVar("Result")

MIXED_AT_ONCE = 2**25  # logits of the mixture bridge, 128 MB in float32


@dataclass(frozen=True)
class HiddenStates:
    """Final hidden states, in the width of the products."""

    last: Tensor
    """(B, L, d), what the head reads; the second network's, where there is one."""
    anchor: Tensor | None
    """(B, L, d), what the anchor head reads; `last` in a pair without a second network, None without a pair."""


class KVCache:
    """The keys and values of what every row has read so far, C places for each block. All rows are equally far."""

    def __init__(self, blocks: int, batch: int, heads: int, length: int, head_width: int, like: Tensor):
        self.length, self.filled = length, 0
        self.keys, self.values = (like.new_zeros(blocks, batch, heads, length, head_width) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        """`filled`, where the device can read it."""
        self.arrivals = torch.zeros(batch, heads, dtype=torch.int32, device=like.device)
        """Where the parts of a token's attention count themselves."""
        self.steps: dict[Callable[..., Any], CudaGraph[Any]] = {}
        """How one token more is read, by what is made of it."""

    def advance(self, num: int) -> None:
        self.filled += num
        self.position.fill_(self.filled)

    def check_room_for(self, num: int) -> None:
        if self.filled + num > self.length:
            raise ValueError(
                f"the cache has {self.length} places, {self.filled} are filled, and {num} more tokens were given; "
                "ask for a longer one"
            )


class FrozenHead:
    """Rows (N, d) -> logits (N, V) in float32 or better, the product in `dtype`; on CUDA its sums are not rounded.

    There the symbols are filled up, as in `heads`: rows of 50,258 numbers make a slow product.
    """

    def __init__(self, head: nn.Linear, dtype: torch.dtype):
        self.bias = kept(head.bias, precise(dtype))
        filling = -len(self.bias) % SYMBOLS_TOGETHER if head.weight.is_cuda else 0
        self.weight = F.pad(kept(head.weight, dtype), (0, 0, 0, filling))

    def __call__(self, rows: Tensor) -> Tensor:
        return precise_product(rows, self.weight, self.bias)


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
        chunks = torch.split(hidden.flatten(0, 1), max(1, MIXED_AT_ONCE // len(self.table)))
        mixed = [head(rows).softmax(dim=-1).to(self.table) @ self.table for rows in chunks]
        return torch.cat(mixed).view_as(hidden).to(precise(hidden.dtype))


class FrozenNetwork:
    """A network to sample from. One call at a time: on CUDA, what `hidden` and `read` return is theirs to write again.

    `dtype` is that of weights and products: unless given, bfloat16 on CUDA, elsewhere the network's own. `graphs` says
    whether CUDA graphs are replayed, one for every shape of input: unless given, wherever they can be. A result then
    holds until the next call of either; clone what is to be kept.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: Transformer | AnchoredTransformer,
        dtype: torch.dtype | None = None,
        graphs: bool | None = None,
    ):
        first = network if isinstance(network, Transformer) else network.anchor
        like = first.embedding.weight
        self.dtype = dtype or (torch.bfloat16 if like.is_cuda else like.dtype)
        self.embedding = kept(like, precise(self.dtype))
        self.trunk, self.head = FrozenTrunk(first.trunk, self.dtype), FrozenHead(first.head, self.dtype)
        self.turns = RotaryTable(first.trunk.head_width, self.embedding)
        self.anchored = isinstance(network, AnchoredTransformer)
        self.bridge = None
        if isinstance(network, AnchoredTransformer) and network.denoiser is not None:
            self.bridge = FrozenBridge(network.denoiser, first.head, self.dtype)
            self.second_trunk = FrozenTrunk(network.denoiser.trunk, self.dtype)
            self.second_head = FrozenHead(network.denoiser.head, self.dtype)
        self.recorder = None
        if graphs is not False and not why_no_cuda_graphs(like.device):
            self.recorder = GraphCache[HiddenStates](like.device)

    @torch.no_grad()
    def hidden(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> HiddenStates:
        """sigma (B,) is the noise the network is told; without it every sequence is told 0. pad is True at padding."""
        if self.recorder is None:
            return self._hidden(z, sigma, pad)
        return self.recorder.replay(self._hidden, z, sigma, pad)

    def _hidden(self, z: Tensor, sigma: Tensor | None, pad: Tensor | None) -> HiddenStates:
        turns, causal = self.turns(z.shape[1]), self.trunk.causal
        visible = None if pad is None else attention_mask(pad, causal)
        return self._through(z, lambda number, qkv: attention(qkv, turns, visible, causal), sigma)

    def _through(self, ids: Tensor, attend: Attend, sigma: Tensor | None) -> HiddenStates:
        """attend numbers the blocks of both trunks in one row."""
        last = anchor = self.trunk(F.embedding(ids, self.embedding), attend, sigma)
        if self.bridge is not None:
            before, handed_over = len(self.trunk.blocks), self.bridge(anchor, self.head)
            last = self.second_trunk(handed_over, lambda number, qkv: attend(before + number, qkv), sigma)
        return HiddenStates(last, anchor if self.anchored else None)

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `Hidden.last`; in float32, or better where `dtype` is."""
        return (self.head if self.bridge is None else self.second_head)(rows)

    @torch.no_grad()
    def anchor_logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `Hidden.anchor`."""
        assert self.anchored, "a network alone has no anchor head"
        return self.head(rows)

    def cache(self, batch: int, length: int) -> KVCache:
        """Room for the keys and values of `batch` rows of at most `length` tokens."""
        assert self.trunk.causal, "later tokens change earlier ones' keys: nothing can be kept"
        blocks = len(self.trunk.blocks) + (0 if self.bridge is None else len(self.second_trunk.blocks))
        like = self.trunk.blocks[0].qkv
        return KVCache(blocks, batch, self.trunk.heads, length, self.turns.head_width, like)

    def read(self, ids: Tensor, cache: KVCache) -> HiddenStates:
        """Hidden states (B, n, d) of the next n tokens of every row, ids (B, n); the cache then holds n more."""
        return self.read_and(_keep, ids, cache)

    @torch.no_grad()
    def read_and(self, make: Callable[..., Result], ids: Tensor, cache: KVCache, *given: Tensor | None) -> Result:
        """make(what `read` returns, *given). For a single token both are one CUDA graph, where graphs are replayed.

        `make` must then be a function of its tensors alone, the same object and the same shapes at every call, and
        never wait for the device; given tensors are copied.
        """
        cache.check_room_for(ids.shape[1])

        def both(ids: Tensor, *given: Tensor | None) -> Result:
            return make(self._read(ids, cache), *given)

        if self.recorder is None or ids.shape[1] > 1:
            made = both(ids, *given)
        else:
            if make not in cache.steps:
                cache.steps[make] = self.recorder.record(both, ids, *given)
            made = cache.steps[make].replay(ids, *given)
        cache.advance(ids.shape[1])
        return made

    def _read(self, ids: Tensor, cache: KVCache) -> HiddenStates:
        turns = self.turns(cache.length)

        def attend(number: int, qkv: Tensor) -> Tensor:
            return attend_one_token(
                qkv, turns, cache.keys[number], cache.values[number], cache.position, cache.arrivals
            )

        return self._through(ids, attend, None)


def _keep(hidden: HiddenStates) -> HiddenStates:
    return hidden
