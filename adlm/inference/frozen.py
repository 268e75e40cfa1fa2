"""Networks with frozen weights, optimized for sampling. Independent of samplers and time grids.

A FrozenNetwork copies the weights, so the original may be freed or trained further. It computes hidden states first,
and logits only for the rows that are requested. Its results equal those of the network in eval mode up to rounding.

On CUDA, functions of tensors are captured once as CUDA graphs and replayed without their launch overhead: a block of a
small network is eight kernels of a few microseconds each, less than the host needs to launch them.

Shapes: B sequences, L tokens, d wide, V symbols, N rows of hidden states, n new tokens, C positions in a KV cache.
"""

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import attend_cached, cached_attention_bias, log_beliefs, needs_bias, precise_product
from adlm.inference.trunk import (
    Attend,
    FrozenTrunk,
    RotaryTable,
    attention,
    attention_mask,
    frozen_copy,
    full_precision,
)
from adlm.models.anchored import AnchoredTransformer
from adlm.models.bridges import FrozenBridge
from adlm.models.heads import VOCABULARY_MULTIPLE, Head
from adlm.models.text_blocks import Layout
from adlm.models.transformer import Transformer

Result = TypeVar("Result")
Captured = TypeVar("Captured")

MAX_IDLE_CACHES = 2
"""KV caches that a network keeps for later runs."""
HEAD_BLOCK = 16
"""Rows of hidden states in each product of a head, for networks with a fixed batch."""
COLLECTION = threading.Lock()
"""Held while garbage is not collected, see `no_collection`."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Without automatic garbage collection, for one thread at a time.

    A graph of a model that is no longer used must not be destroyed while another one is captured: CUDA would end the
    capture with an error (github.com/pytorch/pytorch/pull/161037).
    """
    with COLLECTION:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class CudaGraph(Generic[Result]):
    """A function captured for inputs of given shapes. It reads copies of the inputs and reuses its output tensors."""

    def __init__(self, function: Callable[..., Result], inputs: tuple[Tensor | None, ...], cache: "GraphCache[Any]"):
        self.function = function  # the graph holds addresses of tensors that the function owns
        self.inputs = [None if tensor is None else tensor.clone() for tensor in inputs]
        stream, outside = cache.stream, torch.cuda.current_stream(cache.stream.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm up: kernels are compiled, libraries select algorithms and allocate workspaces
                function(*self.inputs)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture.
        with no_collection(), torch.cuda.graph(self.graph, cache.pool, stream, capture_error_mode="thread_local"):
            self.result = function(*self.inputs)
        outside.wait_stream(stream)

    def replay(self, *inputs: Tensor | None) -> Result:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            if static is not None and tensor is not None and tensor is not static:
                static.copy_(tensor)
        self.graph.replay()
        return self.result


class GraphCache(Generic[Result]):
    """Captures functions on one device and caches the most recently used graphs by function and shapes of the inputs.

    The graphs share one memory pool: a result is valid until the next replay of any of them.
    """

    def __init__(self, device: torch.device, max_graphs: int = 8):
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool, self.max_graphs = torch.cuda.graph_pool_handle(), max_graphs
        self.graphs: dict[tuple[object, ...], CudaGraph[Result]] = {}

    def capture(self, function: Callable[..., Captured], *inputs: Tensor | None) -> CudaGraph[Captured]:
        """Calls the function three times, so three calls must have the same effect as one."""
        with torch.cuda.device(self.stream.device):
            return CudaGraph(function, inputs, self)

    def replay(self, function: Callable[..., Result], *inputs: Tensor | None) -> Result:
        """function(*inputs), captured if no cached graph of an equal function has these shapes."""
        key = (function, *(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs))
        graph = self.graphs.pop(key, None) or self.capture(function, *inputs)
        self.graphs[key] = graph  # moved to the end: the least recently used graph is evicted first
        if len(self.graphs) > self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        return graph.replay(*inputs)


@cache
def why_no_cuda_graphs(device: torch.device) -> str:
    """The reason why CUDA graphs cannot be captured on the device, found by capturing a tiny one; empty if they can."""
    if device.type != "cuda":
        return f"{device.type} has no CUDA graphs"
    try:
        GraphCache[Tensor](device).replay(torch.neg, torch.ones(1, device=device))
    except RuntimeError as error:
        return f"capturing a tiny CUDA graph failed ({error})"
    return ""


@dataclass(frozen=True)
class HiddenStates:
    """Final hidden states, in the dtype of the matrix products."""

    last: Tensor
    """(B, L, d), the input of the head: the denoiser's, if there is one."""
    anchor: Tensor | None
    """(B, L, d), the input of the anchor head: `last` in a pair without a denoiser, None for a single network."""


@dataclass(frozen=True)
class AnchorStates:
    """What the first network computed from some ids; the whole result of a single network."""

    ids: Tensor
    """(B, L)"""
    hidden: Tensor
    """(B, L, d), its final hidden states."""
    bridged: Tensor | None
    """(B, L, d), the input of the denoiser, if there is one."""

    def first(self, num: int) -> "AnchorStates":
        """Those of the first `num` tokens."""
        return self._part(slice(num))

    def after(self, num: int) -> "AnchorStates":
        """Those from token `num` on."""
        return self._part(slice(num, None))

    def rows(self, num: int) -> "AnchorStates":
        """Those of the first `num` rows."""
        return AnchorStates(self.ids[:num], self.hidden[:num], None if self.bridged is None else self.bridged[:num])

    def renew(self, where: Tensor, new: "AnchorStates") -> None:
        """Overwrite the rows `where` (N,) by N new ones."""
        self.ids.index_copy_(0, where, new.ids)
        self.hidden.index_copy_(0, where, new.hidden)
        if self.bridged is not None and new.bridged is not None:
            self.bridged.index_copy_(0, where, new.bridged)

    def copy(self) -> "AnchorStates":
        """With CUDA graphs the next call overwrites the original."""
        return AnchorStates(
            self.ids.clone(), self.hidden.clone(), None if self.bridged is None else self.bridged.clone()
        )

    def _part(self, tokens: slice) -> "AnchorStates":
        bridged = None if self.bridged is None else self.bridged[:, tokens]
        return AnchorStates(self.ids[:, tokens], self.hidden[:, tokens], bridged)


@dataclass(frozen=True)
class OpenTokens:
    """How new tokens are read after those in a KV cache: which of them attend to which, and where they stand."""

    visible: Tensor
    """(n, n), True where the token of a row attends to that of a column; all attend to the whole cache."""
    offsets: Tensor | None = None
    """(n,), the positions, counted from that of the first; None is 0 to n - 1."""


class KVCache:
    """Keys and values of the tokens read so far, C positions per block."""

    def __init__(self, blocks: int, batch: int, heads: int, kv_heads: int, length: int, head_width: int, like: Tensor):
        self.length, self.filled = length, 0
        self.keys, self.values = (like.new_zeros(blocks, batch, kv_heads, length, head_width) for _ in range(2))
        self.position = torch.zeros(batch, dtype=torch.int64, device=like.device)
        """The number of tokens of each row, on the device; `filled` is the largest of them."""
        self.arrivals = torch.zeros(batch, heads, dtype=torch.int32, device=like.device)
        """Counters of the attention kernel: finished parts of each row and query head."""
        self.graphs: dict[tuple[object, ...], CudaGraph[Any]] = {}
        """Captured graphs, see `FrozenNetwork.replay`; the least recently used one first."""

    def clear(self) -> None:
        """As if no token had been read. Its graphs stay valid."""
        self.filled = 0
        self.position.zero_()


class FrozenHead:
    """Rows (N, d) -> logits (N, V) in float32 or float64; the product's inputs are in `dtype`.

    On CUDA the product is accumulated and returned in float32, and the vocabulary is padded as in `models.heads`.
    """

    def __init__(self, head: Head, dtype: torch.dtype):
        self.bias = frozen_copy(head.bias, full_precision(dtype))
        padding = -len(self.bias) % VOCABULARY_MULTIPLE if head.weight.is_cuda else 0
        self.weight = F.pad(frozen_copy(head.weight, dtype), (0, 0, 0, padding))

    def __call__(self, rows: Tensor) -> Tensor:
        return precise_product(rows, self.weight, self.bias)

    def log_beliefs(self, rows: Tensor, mask_id: int) -> Tensor:
        """`clean_log_beliefs` of the logits."""
        return log_beliefs(rows, self.weight, self.bias, mask_id)


class FrozenNetwork:
    """A network to sample from. Not thread-safe.

    `dtype` is that of weights and matrix products; by default bfloat16 on CUDA, elsewhere the network's own. `graphs`
    selects CUDA graphs, one per input shape; by default they are used where the device supports them. With CUDA graphs
    the tensors that `hidden` and `read` return are overwritten by the next call of either; clone them to keep them.

    With `batch`, `hidden` reads batches of up to `batch` rows, padded to exactly that many, and heads run on blocks of
    HEAD_BLOCK. The shapes of all matrix products are then the same whatever else is in the batch, and with them the
    bits of a row's result: kernels for other shapes add in another order.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: Transformer | AnchoredTransformer,
        dtype: torch.dtype | None = None,
        graphs: bool | None = None,
        batch: int | None = None,
    ):
        self.batch = batch
        first = network if isinstance(network, Transformer) else network.anchor
        like = first.embedding.weight
        self.dtype = dtype or (torch.bfloat16 if like.is_cuda else like.dtype)
        self.embedding = frozen_copy(like, full_precision(self.dtype))
        self.trunk, self.head = FrozenTrunk(first.trunk, self.dtype), FrozenHead(first.head, self.dtype)
        rotary_base = first.trunk.rotary_base if first.trunk.positions is None else None
        self.rotary_table = RotaryTable(first.trunk.head_width, self.embedding, rotary_base)
        self.anchored = isinstance(network, AnchoredTransformer)
        self.text_blocks = first.text_blocks
        self.chain = None if network.chain is None else copy.deepcopy(network.chain).to(self.dtype)
        self.memory = None if first.memory is None else frozen_copy(first.memory.weight, self.dtype)
        self.rates = None if network.rates is None else FrozenHead(network.rates.masks, self.dtype)
        self.bridge: FrozenBridge | None = None
        if isinstance(network, AnchoredTransformer) and network.denoiser is not None:
            bridge = network.denoiser.bridge
            self.bridge = bridge.frozen(first.head, self.dtype)
            self.continues_stream, self.adds_input = bridge.continues_stream, bridge.adds_input
            self.denoiser_trunk = FrozenTrunk(network.denoiser.trunk, self.dtype, first.trunk.condition)
            self.denoiser_head = FrozenHead(network.denoiser.head, self.dtype)
        self.idle_caches: list[KVCache] = []
        """Of finished runs, see `lend_cache`; the least recently used one first."""
        self.max_idle_caches = 0
        self.graph_cache = None
        if graphs is not False and not why_no_cuda_graphs(like.device):
            self.graph_cache, self.max_idle_caches = GraphCache[Any](like.device), MAX_IDLE_CACHES

    @torch.no_grad()
    def hidden(
        self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None, memory: Tensor | None = None
    ) -> HiddenStates:
        """sigma (B,) is the noise level for time-conditioned networks, 0 where it is None. pad is True at padding.

        `memory` (B, L, d) is that of `Transformer.hidden`, for networks that have one.
        """
        hidden = self._on_rows(self._hidden, z, sigma, pad, memory)
        if self.batch is None:
            return hidden
        return HiddenStates(hidden.last[: len(z)], None if hidden.anchor is None else hidden.anchor[: len(z)])

    @torch.no_grad()
    def read_anchors(self, z: Tensor, pad: Tensor | None = None) -> AnchorStates:
        """The anchor network's part of `hidden`, of whole rows and without sigma; no later call overwrites it."""
        return self._on_rows(self._read_anchors, z, pad).rows(len(z)).copy()

    @torch.no_grad()
    def denoise(self, z: Tensor, anchors: AnchorStates, pad: Tensor | None = None) -> HiddenStates:
        """The denoiser's part of `hidden`, given what the anchor network read of the same rows, then or before."""
        last = self._on_rows(self._denoise, z, pad, anchors.ids, anchors.bridged)[: len(z)]
        return HiddenStates(last, anchors.hidden)

    def _on_rows(self, function: Callable[..., Result], z: Tensor, *inputs: Tensor | None) -> Result:
        """function(z, *inputs), captured with CUDA graphs; with a fixed batch the rows of all of them are padded."""
        if self.batch is not None:
            assert len(z) <= self.batch, f"{len(z)} rows do not fit a fixed batch of {self.batch}"
            inputs = tuple(None if each is None else repeat_first(each, self.batch) for each in inputs)
            z = repeat_first(z, self.batch)
        if self.graph_cache is None:
            return function(z, *inputs)
        return self.graph_cache.replay(function, z, *inputs)  # type: ignore[no-any-return]

    def _hidden(self, z: Tensor, sigma: Tensor | None, pad: Tensor | None, memory: Tensor | None) -> HiddenStates:
        if self.text_blocks is not None:
            return self.block_hidden(z, z, pad)[0]
        return self._run_trunks(z, *self._whole_rows(z, pad), sigma, memory)

    def _read_anchors(self, z: Tensor, pad: Tensor | None) -> AnchorStates:
        return self._run_anchor(z, *self._whole_rows(z, pad), None)

    def _denoise(self, z: Tensor, pad: Tensor | None, read: Tensor, bridged: Tensor) -> Tensor:
        anchors = AnchorStates(read, bridged, bridged)  # the denoiser reads no hidden states
        return self._run_denoiser(z, anchors, *self._whole_rows(z, pad), None).last

    def _whole_rows(self, z: Tensor, pad: Tensor | None) -> tuple[Tensor, Attend]:
        """The positions of rows z (B, L), and their attention."""
        rotary, causal, kv_heads = self.rotary_table(z.shape[1]), self.trunk.causal, self.trunk.kv_heads
        visible = None if pad is None else attention_mask(pad, causal)
        positions = torch.arange(z.shape[1], device=z.device)
        return positions, lambda number, qkv: attention(qkv, rotary, visible, causal, kv_heads)

    @torch.no_grad()
    def block_hidden(
        self, x: Tensor, z: Tensor, pad: Tensor | None = None, stale: Tensor | None = None
    ) -> tuple[HiddenStates, Tensor]:
        """Of a block-causal network, the states that predict each token of the noisy copy z (B, L) of clean ids x, and
        those (B, L, d) that predict each token from the clean text before it. Those of the first token are 0.

        The anchor network reads `stale` (B, L) instead of z, if it is given.
        """
        assert self.text_blocks is not None
        places, kv_heads = self.text_blocks.places(x, z, pad), self.trunk.kv_heads
        read = places if stale is None else self.text_blocks.places(x, stale, pad)
        positions = places.layout.positions
        rotary = self.rotary_table(x.shape[1])[positions]

        def attend_in(layout: Layout) -> Attend:
            return lambda number, qkv: attention(qkv, rotary, layout.visible, False, kv_heads)

        anchors = self._run_anchor(read.ids, positions, attend_in(read.layout), None)
        hidden = self._run_denoiser(places.ids, anchors, positions, attend_in(places.layout), None)
        anchor = None if hidden.anchor is None else places.noisy(hidden.anchor)
        return HiddenStates(places.noisy(hidden.last), anchor), places.clean(hidden.last)

    def _run_trunks(
        self, ids: Tensor, positions: Tensor, attend: Attend, sigma: Tensor | None, memory: Tensor | None = None
    ) -> HiddenStates:
        """`attend` receives the index of a block, counted over both trunks."""
        anchors = self._run_anchor(ids, positions, attend, sigma, memory)
        return self._run_denoiser(ids, anchors, positions, attend, sigma)

    def _run_anchor(
        self, ids: Tensor, positions: Tensor, attend: Attend, sigma: Tensor | None, memory: Tensor | None = None
    ) -> AnchorStates:
        h = F.embedding(ids, self.embedding)
        if memory is not None and self.memory is not None:
            h = h + F.linear(memory, self.memory).to(h.dtype)
        hidden = self.trunk(h, positions, attend, sigma)  # h is the residual stream from here on
        if self.bridge is None:
            return AnchorStates(ids, hidden, None)
        bridged = self.bridge(h if self.continues_stream else hidden, self.head).to(h.dtype)
        if self.adds_input:
            bridged = bridged + F.embedding(ids, self.embedding)
        return AnchorStates(ids, hidden, bridged)

    def _run_denoiser(
        self, ids: Tensor, anchors: AnchorStates, positions: Tensor, attend: Attend, sigma: Tensor | None
    ) -> HiddenStates:
        """`anchors` may be those of earlier ids; if they are those of the same tensor, they are overwritten."""
        anchor = anchors.hidden if self.anchored else None
        if anchors.bridged is None:
            return HiddenStates(anchors.hidden, anchor)
        bridged, num_before = anchors.bridged, len(self.trunk.blocks)
        if ids is not anchors.ids:
            bridged = bridged + (F.embedding(ids, self.embedding) - F.embedding(anchors.ids, self.embedding))
        last = self.denoiser_trunk(bridged, positions, lambda number, qkv: attend(num_before + number, qkv), sigma)
        return HiddenStates(last, anchor)

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `HiddenStates.last`, in float32; in float64 if `dtype` is."""
        return self._in_blocks(self._last_head, rows)

    @torch.no_grad()
    def log_beliefs(self, rows: Tensor, mask_id: int) -> Tensor:
        """`clean_log_beliefs` of `logits`; on CUDA fused with them."""
        return self._in_blocks(functools.partial(self._last_head.log_beliefs, mask_id=mask_id), rows)

    @property
    def _last_head(self) -> FrozenHead:
        return self.head if self.bridge is None else self.denoiser_head

    @torch.no_grad()
    def chained(self, state: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """`Chain.forward` of the tokens (N,); the state itself in a network without a chain."""
        return state if self.chain is None else self.chain(state, before, F.embedding(tokens, self.embedding))

    @torch.no_grad()
    def anchor_logits(self, rows: Tensor) -> Tensor:
        """(N, V) for rows (N, d) of `HiddenStates.anchor`."""
        assert self.anchored, "a single network has no anchor head"
        return self._in_blocks(self.head, rows)

    @torch.no_grad()
    def anchor_log_beliefs(self, rows: Tensor, mask_id: int) -> Tensor:
        """`clean_log_beliefs` of `anchor_logits`."""
        assert self.anchored, "a single network has no anchor head"
        return self._in_blocks(functools.partial(self.head.log_beliefs, mask_id=mask_id), rows)

    @torch.no_grad()
    def log_rates(self, rows: Tensor) -> Tensor:
        """(N,) for rows (N, d) of `HiddenStates.anchor`, or of `HiddenStates.last` in a single network."""
        assert self.rates is not None, "the network predicts no rates"
        return self._in_blocks(self.rates, rows)[:, 0]

    def _in_blocks(self, head: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """head(rows), with a fixed batch on blocks of HEAD_BLOCK of them."""
        if self.batch is None or len(rows) == 0:
            return head(rows)
        blocks = [head(repeat_first(block, HEAD_BLOCK))[: len(block)] for block in torch.split(rows, HEAD_BLOCK)]
        return torch.cat(blocks)

    def cache(self, batch: int, length: int) -> KVCache:
        """An empty KV cache for `batch` rows of at most `length` tokens."""
        assert self.trunk.causal or self.text_blocks, (
            "a bidirectional network has no KV cache: later tokens change the keys of earlier ones"
        )
        blocks = len(self.trunk.blocks) + (0 if self.bridge is None else len(self.denoiser_trunk.blocks))
        trunk, like = self.trunk, self.trunk.blocks[0].qkv
        return KVCache(blocks, batch, trunk.heads, trunk.kv_heads, length, self.rotary_table.head_width, like)

    @contextmanager
    def lend_cache(self, batch: int, length: int) -> Iterator[KVCache]:
        """A KV cache for one run. With CUDA graphs, it and its graphs are kept for the next run of this shape."""
        fitting = [cache for cache in self.idle_caches if cache.keys.shape[1] == batch and cache.length == length]
        if fitting:
            self.idle_caches.remove(cache := fitting[-1])
            cache.clear()
        else:
            cache = self.cache(batch, length)
        try:
            yield cache
        finally:
            self.idle_caches.append(cache)
            del self.idle_caches[: -self.max_idle_caches or None]

    def drop_graphs(self) -> None:
        """Graphs hold the network, which would keep its memory until Python looks for such cycles."""
        self.idle_caches.clear()
        if self.graph_cache is not None:
            self.graph_cache.graphs.clear()

    def read(self, ids: Tensor, cache: KVCache) -> HiddenStates:
        """Hidden states (B, n, d) of the next n tokens ids (B, n) of every row; appends them to the cache."""
        return self.read_and("read", identity, ids, cache)

    def read_and(
        self, key: object, function: Callable[..., Result], ids: Tensor, cache: KVCache, *inputs: Tensor | None
    ) -> Result:
        """function(read(ids, cache), *inputs). With CUDA graphs, both are one graph if a single token is read.

        `key` and `function` are then subject to the rules of `replay`.
        """
        num = ids.shape[1]
        if cache.filled + num > cache.length:
            raise ValueError(
                f"the KV cache has {cache.length} positions, {cache.filled} are filled, and {num} more tokens were "
                "given; create a longer cache"
            )

        def read(ids: Tensor, *inputs: Tensor | None) -> Result:
            return function(self.read_open(ids, cache), *inputs)

        result = self.replay(key, read, cache, ids, *inputs) if num == 1 else read(ids, *inputs)
        cache.filled += num
        cache.position += num
        return result

    @torch.no_grad()
    def replay(self, key: object, function: Callable[..., Result], cache: KVCache, *inputs: Tensor | None) -> Result:
        """function(*inputs), with CUDA graphs one graph of the cache: captured once for a key and shapes of the inputs.

        All functions with the same key must do the same: one that was captured in an earlier run is used in its place.
        So they depend on their inputs, the key, this network and the cache alone. They never synchronize with the
        device. A function is called three times at first, so three calls must have the same effect as one. The inputs
        are copied; the result is overwritten by the next call of a graph.
        """
        if self.graph_cache is None:
            return function(*inputs)
        key = (key, *(None if tensor is None else tensor.shape for tensor in inputs))
        graph = cache.graphs.pop(key, None) or self.graph_cache.capture(function, *inputs)
        cache.graphs[key] = graph  # moved to the end
        if len(cache.graphs) > self.graph_cache.max_graphs:
            del cache.graphs[next(iter(cache.graphs))]
        return graph.replay(*inputs)  # type: ignore[no-any-return]

    def replay_state(
        self,
        key: object,
        function: Callable[..., tuple[Tensor, ...]],
        cache: KVCache,
        state: tuple[Tensor, ...],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The next state, function(*state, *inputs), by the rules of `replay`.

        With CUDA graphs, the result is overwritten by the next call with this key and cache, and by no other graph.
        """
        if self.graph_cache is None:
            return function(*state, *inputs)

        def advance(*tensors: Tensor) -> tuple[Tensor, ...]:
            own = tensors[: len(state)]
            for tensor, new in zip(own, function(*tensors), strict=True):
                tensor.copy_(new)
            return own  # the graph's copies of its inputs: they are not in the memory that graphs share

        return self.replay(key, advance, cache, *state, *inputs)

    @torch.no_grad()
    def read_open(
        self, ids: Tensor, cache: KVCache, tokens: OpenTokens | None = None, unseen: Tensor | None = None
    ) -> HiddenStates:
        """`read` of n tokens that attend to each other as `tokens` says, or causally, and are not yet part of the
        text: `cache.filled` and `cache.position` stay, and the next call overwrites their keys and values.

        To keep the first of them, as far as they are causal, add their number to both. `unseen` (B, n) is True at
        tokens that others do not attend to.
        """
        positions, attend = self._open(ids, cache, tokens, unseen)
        return self._run_trunks(ids, positions, attend, None)

    @torch.no_grad()
    def read_open_anchors(
        self, ids: Tensor, cache: KVCache, tokens: OpenTokens, unseen: Tensor | None = None
    ) -> AnchorStates:
        """The anchor network's part of `read_open`."""
        positions, attend = self._open(ids, cache, tokens, unseen)
        return self._run_anchor(ids, positions, attend, None)

    @torch.no_grad()
    def denoise_open(
        self, ids: Tensor, anchors: AnchorStates, cache: KVCache, tokens: OpenTokens, unseen: Tensor | None = None
    ) -> HiddenStates:
        """The denoiser's part of `read_open`, given what the anchor network read of the same tokens, then or before."""
        positions, attend = self._open(ids, cache, tokens, unseen)
        return self._run_denoiser(ids, anchors, positions, attend, None)

    def _open(
        self, ids: Tensor, cache: KVCache, tokens: OpenTokens | None, unseen: Tensor | None
    ) -> tuple[Tensor, Attend]:
        """The positions of new tokens, and their attention, which writes their keys and values into the cache."""
        rotary, visible, bias, positions = self.rotary_table(cache.length), None, None, cache.position[:, None]
        if ids.shape[1] > 1 or tokens is not None:
            num = torch.arange(ids.shape[1], device=ids.device)
            offsets, visible = num, (num <= num[:, None])[None]
            if tokens is not None:
                offsets, visible = num if tokens.offsets is None else tokens.offsets, tokens.visible[None]
            if unseen is not None:
                visible = visible & ~unseen[:, None] | torch.eye(len(num), dtype=torch.bool, device=ids.device)
            positions = positions + offsets
            rotary = rotary[positions]
            if needs_bias(cache.keys, len(num)):
                group = self.trunk.heads // self.trunk.kv_heads
                bias = cached_attention_bias(cache.position, cache.length, visible, group, cache.keys.dtype)

        def attend(number: int, qkv: Tensor) -> Tensor:
            keys, values = cache.keys[number], cache.values[number]
            return attend_cached(qkv, rotary, keys, values, cache.position, cache.arrivals, visible, bias)

        return positions, attend


class FrozenCopy:
    """The frozen copy of a network for sampling, a `FrozenNetwork`, rebuilt when a weight has changed.

    A change is an increment of a weight's version counter, or another address: optimizer steps, `load_state_dict`,
    `to` and in-place operations all cause one, and comparing counters reads no weight. In-place writes to
    `weight.data` bypass the counter, as do changes of weights made in inference mode; call `refresh` after those.
    `batch` is that of `FrozenNetwork`.
    """

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch
        self._versions: list[tuple[int, int]] = []
        self._frozen: FrozenNetwork | None = None

    def get(self, network: Transformer | AnchoredTransformer) -> FrozenNetwork:
        versions = [
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in network.parameters()
        ]
        if self._frozen is None or versions != self._versions:
            self.refresh()
            self._versions, self._frozen = versions, FrozenNetwork(network, batch=self.batch)
        return self._frozen

    def refresh(self) -> None:
        """Rebuild at the next `get`."""
        if self._frozen is not None:
            self._frozen.drop_graphs()
        self._frozen = None


def repeat_first(rows: Tensor, num: int) -> Tensor:
    """(num, ...): the rows (n, ...), followed by copies of the first."""
    return torch.cat([rows, rows[:1].expand(num - len(rows), *rows.shape[1:])])


def identity(hidden: HiddenStates) -> HiddenStates:
    """For `read_and` where nothing is to be computed from the hidden states in the same call."""
    return hidden
