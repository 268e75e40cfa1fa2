"""The transformer of SEDD and ADLM, bidirectional or causal, with or without time conditioning; or of Llama's blocks.

Independent of masks and anchors.

Shapes: B sequences, L tokens, d wide, H heads of d / H each, V symbols, c wide time condition. `pad` is True
at padding.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adlm.config.schema import ChainTarget, Model
from adlm.models.chain import Chain
from adlm.models.float8 import BlockLinear, product
from adlm.models.gpt2 import Gpt2Block
from adlm.models.heads import Head, Planner, Positions, Scored, TiedHead, nats_at_positions, score_positions
from adlm.models.layers import (
    LayerNorm,
    RMSNorm,
    apply_rotary,
    rms_norm,
    rotary_angles,
    rotary_frequencies,
    self_attention,
)
from adlm.models.llama import LlamaBlock
from adlm.models.text_blocks import Layout, Places, TextBlocks

if TYPE_CHECKING:
    from adlm.models.rates import RevealRates, TextRates


class TimeCondition(nn.Module):
    """Embedding (B, c) of the noise level sigma (B,): 128 cosines, then 128 sines, through two linear layers."""

    FREQUENCIES = 128
    LONGEST_PERIOD = 10_000.0

    def __init__(self, condition: int):
        super().__init__()
        self.inner = nn.Linear(2 * self.FREQUENCIES, condition)
        self.outer = nn.Linear(condition, condition)

    def forward(self, sigma: Tensor) -> Tensor:
        steps = torch.arange(self.FREQUENCIES, device=sigma.device, dtype=sigma.dtype)
        angles = sigma[:, None] * torch.exp(-math.log(self.LONGEST_PERIOD) / self.FREQUENCIES * steps)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return F.silu(self.outer(F.silu(self.inner(waves.to(self.inner.weight.dtype)))))


def modulate(h: Tensor, shift: Tensor | float, scale: Tensor | float) -> Tensor:
    """h (1 + scale) + shift: adaLN, the identity at shift = scale = 0."""
    return h * (1 + scale) + shift


class Block(nn.Module):
    """Attention, then an MLP, each applied to a modulated LayerNorm and added to the residual stream through a gate.

    With `condition` None there is no adaLN (the autoregressive networks): shift and scale are 0 and the gates 1.
    """

    def __init__(self, width: int, heads: int, condition: int | None, dropout: float, causal: bool, qk_norm: bool):
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm1 = LayerNorm(width)
        self.qkv = BlockLinear(width, 3 * width, bias=False)
        self.query_norm, self.key_norm = (
            nn.Parameter(torch.ones(width // heads)) if qk_norm else None for _ in range(2)
        )
        self.out = BlockLinear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.widen = BlockLinear(width, 4 * width)
        self.narrow = BlockLinear(4 * width, width)
        self.modulation = None if condition is None else zero_linear(condition, 6 * width)

    def forward(
        self, h: Tensor, angles: tuple[Tensor, Tensor], condition: Tensor | None, visible: Tensor | None
    ) -> Tensor:
        """angles are cos and sin (L, head_width / 2), condition (1, c) or (B, c), visible a mask of attendable keys."""
        parts: tuple[Tensor | float, ...] = (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)
        if self.modulation is not None:
            parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        h = h + self._attend(modulate(self.norm1(h), shift1, scale1), gate1, angles, visible)
        return h + self.mlp(modulate(self.norm2(h), shift2, scale2), gate2)

    def _attend(self, h: Tensor, gate: Tensor | float, angles: tuple[Tensor, Tensor], visible: Tensor | None) -> Tensor:
        mixed = self_attention(*self.queries_keys_values(h, angles), visible, self.causal)
        return self.gated(mixed, self.out, gate)

    def queries_keys_values(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, d / H) each, rotated, of normed and modulated hidden states (B, L, d)."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)  # (B, L, H, d / H) each
        if self.query_norm is not None and self.key_norm is not None:
            q, k = rms_norm(q, self.query_norm), rms_norm(k, self.key_norm)
        angles = angles[0][:, None], angles[1][:, None]
        return apply_rotary(q, angles).transpose(1, 2), apply_rotary(k, angles).transpose(1, 2), v.transpose(1, 2)

    def mlp(self, h: Tensor, gate: Tensor | float) -> Tensor:
        return self.gated(F.gelu(self.widen(h), approximate="tanh"), self.narrow, gate)

    def gated(self, h: Tensor, layer: BlockLinear, gate: Tensor | float) -> Tensor:
        """gate * dropout(layer(h)).

        A gate shared by all sequences, (1, 1, d), is multiplied into the layer's weights instead:
        gate (W h + b) = (gate W) h + gate b. This costs one multiplication per weight instead of one per activation,
        and the gate's gradient is a sum over weights instead of over tokens.
        """
        if isinstance(gate, float) or len(gate) > 1:
            return gate * F.dropout(layer(h), self.dropout, self.training)
        gate = gate[0, 0]
        bias = None if layer.bias is None else gate * layer.bias
        gated = product(h, gate[:, None] * layer.weight, bias, layer.float8 and self.training)
        return F.dropout(gated, self.dropout, self.training)


@torch.no_grad()
def attend_neighbours(block: Block, sharpness: float = 8.0, slowest: float = 0.05) -> None:
    """Initialize heads to attend to the previous and the next token: model.start "neighbours".

    Sets the gates to 1 and q_i . k_j = sharpness * sum_f cos(f (i - j - offset)) + a term of the tokens, with offset 1
    for even heads and -1 for odd ones.

    Queries and keys have no bias, so a purely positional score needs an input component that all tokens share. Here
    this is the shift of the modulation, set to ones: the norm's output sums to 0, so a weight row that sums to 0
    depends on the tokens only, and a constant added to a row depends on the shift only. `f` are the rotary frequencies
    of at least `slowest` radians per token: lower ones do not distinguish adjacent positions.
    """
    assert block.modulation is not None
    if block.qkv.weight.is_meta:  # no storage, and arithmetic on it would make PyTorch import its compiler
        return
    width = block.norm1.weight.numel()
    shift, _, gate1, _, _, gate2 = block.modulation.bias.view(6, width)
    for part in (shift, gate1, gate2):
        part.fill_(1.0)
    weight = block.qkv.weight.view(3, block.heads, -1, width)
    weight -= weight.mean(dim=-1, keepdim=True)
    frequencies = rotary_frequencies(width // block.heads)
    amplitude = (sharpness * (frequencies >= slowest)).sqrt()
    for head in range(block.heads):
        angle = frequencies if head % 2 == 0 else -frequencies
        weight[0, head] += torch.cat([amplitude * angle.cos(), -amplitude * angle.sin()])[:, None] / width
        weight[1, head] += torch.cat([amplitude, torch.zeros_like(amplitude)])[:, None] / width


def zero_linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear layer initialized to zero, as every adaLN and every head in the released code."""
    layer = nn.Linear(width_in, width_out)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def zero_map(width: int) -> nn.Linear:
    """A linear map initialized to zero, without a bias: zero stays zero after training too."""
    layer = nn.Linear(width, width, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


_block_is_built: ContextVar[Callable[[nn.Module], None]] = ContextVar("block_is_built", default=lambda block: None)


@contextmanager
def each_block(function: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, every block of a trunk is given to the function as soon as it is initialized.

    So a network that is built need not be in memory as a whole.
    """
    token = _block_is_built.set(function)
    try:
        yield
    finally:
        _block_is_built.reset(token)


class Trunk(nn.Module):
    """Embedded tokens (B, L, d) -> final hidden states (B, L, d), normed and modulated, ready for a head.

    The blocks and `finish` have static shapes and do nearly all the work: they are the parts to compile. The rotary
    angles are computed outside them: the compiler would recompute every cosine for every query and key. A trunk that
    continues another one has no time condition of its own (`continues`) and is given the other's.
    """

    def __init__(self, model: Model, blocks: int, causal: bool, modulated: bool, continues: bool = False):
        super().__init__()
        modulated = modulated and model.family == "published"
        condition = model.condition if modulated else None
        self.head_width, self.rotary_base = model.hidden // model.heads, model.rotary_base
        self.positions = None
        if model.positions is not None and not continues:
            self.positions = nn.Embedding(model.positions, model.hidden)
            nn.init.normal_(self.positions.weight, std=0.02)
        self.condition = TimeCondition(model.condition) if modulated and not continues else None
        self.norm: RMSNorm | nn.LayerNorm | LayerNorm
        if model.family == "llama":
            self.norm = RMSNorm(model.hidden, model.norm_epsilon)
        elif model.family == "gpt2":
            self.norm = nn.LayerNorm(model.hidden)
        else:
            self.norm = LayerNorm(model.hidden)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            block: LlamaBlock | Gpt2Block | Block
            if model.family == "llama":
                block = LlamaBlock(model, causal)
            elif model.family == "gpt2":
                block = Gpt2Block(model, causal)
            else:
                block = Block(model.hidden, model.heads, condition, model.dropout, causal, model.qk_norm)
                if modulated and model.start == "neighbours":
                    attend_neighbours(block)
            self.blocks.append(block)
            _block_is_built.get()(block)
        self.modulation = zero_linear(model.condition, 2 * model.hidden) if modulated else None

    def forward(
        self,
        h: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        condition: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """sigma (B,) is the noise level for time-conditioned networks; None conditions every sequence on 0.

        `layout` has the positions and the attention of block-causal networks, `pad` included.
        """
        return self.hidden_and_states(h, sigma, pad, condition, layout, keep_states=False)[0]

    def hidden_and_states(
        self,
        h: Tensor,
        sigma: Tensor | None,
        pad: Tensor | None,
        condition: Tensor | None,
        layout: Layout | None,
        keep_states: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output of `forward`, and `ResidualStream.states`."""
        stream = self.residual_stream(h, sigma, pad, condition, layout=layout, keep_states=keep_states)
        return self.finish(stream.last, stream.condition), stream.states

    def residual_stream(
        self,
        h: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        condition: Tensor | None = None,
        early_blocks: int = 0,
        layout: Layout | None = None,
        keep_states: bool = False,
    ) -> "ResidualStream":
        """The output of the blocks, before the final norm; also after `early_blocks` of them, or after each."""
        positions = h.shape[1] if layout is None else layout.positions
        angles = rotary_angles(positions, self.head_width, like=h, base=self.rotary_base)
        if self.positions is not None:
            h = h + self.positions(torch.arange(h.shape[1], device=h.device) if layout is None else layout.positions)
        visible = None if pad is None else attendable(pad)
        if layout is not None:
            visible = layout.visible
        if self.condition is not None:
            precise = torch.float64 if h.dtype == torch.float64 else torch.float32
            condition = self.condition(h.new_zeros(1, dtype=precise) if sigma is None else sigma.to(precise))
        early, states = h, []
        for number, block in enumerate(self.blocks, 1):
            h = block(h, angles, condition, visible)
            early = h if number == early_blocks else early
            if keep_states:
                states.append(h)
        return ResidualStream(h, early, condition, states)

    def finish(self, h: Tensor, condition: Tensor | None) -> Tensor:
        """The final norm, modulated."""
        if self.modulation is None:
            return self.norm(h)  # type: ignore[no-any-return]
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return modulate(self.norm(h), shift, scale)


@dataclass(frozen=True)
class ResidualStream:
    """The hidden states between the blocks of a trunk, not normed."""

    last: Tensor
    """(B, L, d), after the last block."""
    early: Tensor
    """(B, L, d), after the first `early_blocks` blocks; the input if it is 0."""
    condition: Tensor | None
    """The time condition (1, c) or (B, c)."""
    states: list[Tensor]
    """(B, L, d) each, after every block, if they were to be kept; else empty."""


def attendable(pad: Tensor) -> Tensor:
    """Keys that may be attended to, (B, 1, 1, L): all but padding; all in a row of only padding, to avoid NaN."""
    return (~pad | pad.all(dim=-1, keepdim=True))[:, None, None, :]


@dataclass(frozen=True)
class LastCall:
    """What a network with memory read in the call before, in training."""

    ids: Tensor
    """(B, L)"""
    remembering: Tensor
    """(B, L), True at the masks of this call that remember it."""

    @torch.no_grad()
    def memory(self, hidden: Callable[..., Tensor], sigma: Tensor | None, pad: Tensor | None) -> Tensor:
        """(B, L, d), the states of that call, without memory and without a gradient; 0 where nothing is remembered."""
        return hidden(self.ids, sigma, pad) * self.remembering[..., None]


@dataclass(frozen=True)
class ScoreOptions:
    """Optional inputs of `score`."""

    stale: Tensor | None = None
    """(B, L), ids with more masks than z, which the anchor network of a pair reads instead of z."""
    last_call: LastCall | None = None
    """What a network with memory remembers."""
    planner: Planner | None = None
    """Of whole rows: changes the weight by the predictions of the network, or of a pair's anchor network."""
    first_block: int | None = None
    """Of block-causal networks: the length of the first block."""
    causal_weight: Tensor | None = None
    """(B, L), of the next-token cross-entropies of their clean copy."""
    chain_weight: Tensor | None = None
    """(B, L), of the chain's cross-entropies, to x or to the predictions of the clean copy."""
    chain_target: ChainTarget = "text"
    align_weight: Tensor | None = None
    """(B, L), of the misalignment of the copies."""


NO_OPTIONS = ScoreOptions()


class Transformer(nn.Module):
    """ids (B, L) -> logits (B, L, V).

    With `text_blocks` it is block-causal: it reads clean ids beside the noisy ones, and predicts each token but the
    first of a row. Without clean ids the noisy ones are taken for them: right where all masks are in the last block.
    """

    def __init__(
        self,
        model: Model,
        num_symbols: int,
        causal: bool = False,
        modulated: bool = True,
        text_blocks: TextBlocks | None = None,
        rates: "RevealRates | None" = None,
    ):
        super().__init__()
        self.text_blocks, self.rates = text_blocks, rates
        self.embedding = nn.Embedding(num_symbols, model.hidden)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))
        self.trunk = Trunk(model, model.blocks, causal, modulated)
        self.head: Head = TiedHead(self.embedding) if model.tie_embedding else zero_linear(model.hidden, num_symbols)
        self.chain = Chain(model.hidden, model.chain) if model.chain else None
        self.memory = zero_map(model.hidden) if model.memory else None

    def hidden(
        self,
        z: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        first_block: int | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """`memory` (B, L, d) are states of an earlier call at the masks that remember it, 0 elsewhere."""
        if self.text_blocks is None:
            return self.trunk(self.embedded(z, memory), sigma, pad)  # type: ignore[no-any-return]
        places = self.text_blocks.places(z, z, pad, first_block)
        return places.noisy(self.trunk(self.embedding(places.ids), layout=places.layout))

    def embedded(self, z: Tensor, memory: Tensor | None) -> Tensor:
        """(B, L, d), what the blocks read of ids and of the memory of a network that has one."""
        if memory is None:
            return self.embedding(z)  # type: ignore[no-any-return]
        assert self.memory is not None
        return self.embedding(z) + self.memory(memory)  # type: ignore[no-any-return]

    def to_remember(
        self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """(B, L, d), the states that the next call can remember: those that the head reads."""
        return self.hidden(z, sigma, pad, memory=memory)

    def forward(
        self,
        z: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        first_block: int | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        return self.head(self.hidden(z, sigma, pad, first_block, memory))  # type: ignore[no-any-return]

    def causal_logits(self, x: Tensor) -> Tensor:
        """(B, L, V), of each token given the clean text before it, by a block-causal network; the first is given."""
        assert self.text_blocks is not None
        places = self.text_blocks.places(x, x)
        hidden = self.trunk(self.embedding(places.ids), layout=places.layout)
        return self.head(places.clean(hidden))  # type: ignore[no-any-return]

    def score(
        self,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        mask_id: int | None = None,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        options: ScoreOptions = NO_OPTIONS,
    ) -> Scored:
        """The cross-entropy of x given z where `weight` (B, L) is not 0, normalised over all symbols but `mask_id`.

        The head runs at those positions only. All parameters are read within this one call, as FSDP2 requires of a
        wrapped method.
        """
        positions = Positions(weight)
        if self.text_blocks is None:
            memory = None if options.last_call is None else options.last_call.memory(self.hidden, sigma, pad)
            hidden = self.hidden(z, sigma, pad, memory=memory)
            if options.planner is not None:
                with torch.no_grad():
                    nats = score_positions(hidden, self.head, x, weight, mask_id, positions).nats
                weight = options.planner.weight(weight, nats)
            scored = score_positions(hidden, self.head, x, weight, mask_id, positions)
            return scored if self.rates is None else replace(scored, log_rates=self.rates.of_masks(hidden))
        places = self.text_blocks.places(x, z, pad, options.first_block)
        hidden, states = self.trunk.hidden_and_states(
            self.embedding(places.ids), None, None, None, places.layout, options.align_weight is not None
        )
        scored = score_positions(places.noisy(hidden), self.head, x, weight, mask_id, positions)
        return score_copies(scored, self, x, mask_id, places, hidden, states, options)

    def log_rates(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        """(B, L), of the masked tokens, by a network that has rates."""
        assert self.rates is not None
        return self.rates.of_masks(self.hidden(z, sigma, pad))

    def text_rates(self, x: Tensor, pad: Tensor | None = None) -> "TextRates":
        """Of clean ids (B, L), by a network that has rates."""
        assert self.rates is not None
        return self.rates.of_text(x, self.embedding(x), pad)

    def nats_at_positions(
        self,
        z: Tensor,
        where: Tensor,
        objective: Callable[[Tensor, Tensor], Tensor],
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
    ) -> Tensor:
        """`objective` (B, L), other than the cross-entropy, at the positions `where`: see `heads.nats_at_positions`."""
        return nats_at_positions(self.hidden(z, sigma, pad), self.head, where, objective)


def score_copies(
    scored: Scored,
    network: Any,
    x: Tensor,
    mask_id: int | None,
    places: Places,
    hidden: Tensor,
    states: list[Tensor],
    options: ScoreOptions,
) -> Scored:
    """Adds the other terms of a block-causal network to `scored`: next token, chain and alignment.

    `hidden` (B, P, d) is the output of the trunk at all places, `states` are the hidden states after each block.
    """
    causal = chained = misalignment = None
    if options.causal_weight is not None:
        causal = score_positions(places.clean(hidden), network.head, x, options.causal_weight, mask_id)
    if options.chain_weight is not None and network.chain is not None:
        chain = network.chain.states(places.noisy(hidden), network.embedding(x), places.cut)
        targets = x if options.chain_target == "text" else places.clean(hidden.detach())
        chained = score_positions(chain, network.head, targets, options.chain_weight, mask_id)
    if options.align_weight is not None:
        misalignment = places.misalignment(states, options.align_weight)
    return replace(scored, causal=causal, chained=chained, misalignment=misalignment)


def num_parameters(network: nn.Module) -> int:
    """Number of parameters, counted elementwise."""
    return sum(parameter.numel() for parameter in network.parameters())


def weights_sha256(network: nn.Module) -> str:
    """sha256 of all weights with their names, shapes and dtypes."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


Network = TypeVar("Network", bound=nn.Module)

INITIALIZERS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoInitialization(TorchFunctionMode):
    """Skips random initialization: on the meta device it would make PyTorch import its compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        return named["tensor"] if func in INITIALIZERS else func(*args, **named)


def on_meta(build: Callable[[], Network]) -> Network:
    """`build()` on the meta device: parameter names and shapes without storage."""
    with torch.device("meta"), _NoInitialization():
        return build()
