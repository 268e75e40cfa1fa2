"""The anchored pair of networks: an anchor network, a bridge, and a denoiser that reads the bridge's output.

Independent of masking, anchor selection and gamma: the positions to score are passed in as weights.

Shapes: B sequences, L tokens, d wide, V symbols. `pad` is True at padding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from adlm.config.schema import Model
from adlm.models.bridges import Bridge
from adlm.models.chain import Chain
from adlm.models.heads import (
    Head,
    Positions,
    Scored,
    TiedHead,
    plain_linear_cross_entropy,
    score_positions,
)
from adlm.models.rates import RevealRates, TextRates
from adlm.models.text_blocks import Layout, TextBlocks
from adlm.models.transformer import NO_OPTIONS, ScoreOptions, Transformer, Trunk, score_copies, zero_linear
from adlm.registry import BRIDGES


class DenoiserNetwork(nn.Module):
    """The second network: bridge output -> hidden states -> logits. `anchor_head` is the head of the first."""

    def __init__(self, model: Model, num_symbols: int, causal: bool, modulated: bool, anchor_head: Head):
        super().__init__()
        self.bridge: Bridge = BRIDGES[model.bridge](num_symbols, model.hidden)
        if model.bridge_start == "identity" and not anchor_head.weight.is_meta:  # torch.eye there imports the compiler
            self.bridge.start_as_identity(anchor_head)
        self.trunk = Trunk(model, model.num_denoiser_blocks, causal, modulated, self.bridge.continues_stream)
        tied = model.tie_heads or model.tie_embedding
        self.head: Head = TiedHead(anchor_head) if tied else zero_linear(model.hidden, num_symbols)


class EarlyHead(nn.Module):
    """A second anchor head, on the residual stream between two blocks of the anchor network, with a norm of its own."""

    def __init__(self, model: Model, num_symbols: int, causal: bool, modulated: bool):
        super().__init__()
        self.trunk = Trunk(model, 0, causal, modulated, continues=True)
        self.head = zero_linear(model.hidden, num_symbols)


@dataclass(frozen=True)
class PairHidden:
    """The final hidden states (B, L, d) of both networks."""

    anchor: Tensor
    denoiser: Tensor
    early: Tensor | None
    """Those of the second anchor head, if there is one."""
    states: list[Tensor]
    """After every block of both networks, if they were to be kept; else empty."""


class AnchoredTransformer(nn.Module):
    """ids (B, L) -> anchor logits and denoiser logits (B, L, V). No token is decoded between the two networks.

    With `model.denoiser_blocks` 0 there is no denoiser, and the anchor network's logits are used as the denoiser's.
    """

    def __init__(
        self,
        model: Model,
        num_symbols: int,
        causal: bool = False,
        modulated: bool = True,
        text_blocks: TextBlocks | None = None,
        rates: RevealRates | None = None,
    ):
        super().__init__()
        self.rates = rates
        self.anchor = Transformer(replace(model, chain=0), num_symbols, causal, modulated, text_blocks)
        self.denoiser = None
        if model.num_denoiser_blocks:
            self.denoiser = DenoiserNetwork(model, num_symbols, causal, modulated, self.anchor.head)
        self.early_blocks, self.early = model.second_anchor_head, None
        if self.early_blocks:
            self.early = EarlyHead(model, num_symbols, causal, modulated)
        self.chain = Chain(model.hidden, model.chain) if model.chain else None

    def _hidden(
        self,
        z: Tensor,
        sigma: Tensor | None,
        pad: Tensor | None,
        cross: Callable[..., Tensor] | None = None,
        layout: Layout | None = None,
        stale: Tensor | None = None,
        stale_layout: Layout | None = None,
        keep_states: bool = False,
        memory: Tensor | None = None,
    ) -> PairHidden:
        """`cross` replaces the forward of the bridge. With a `layout`, z are the ids of places.

        The anchor network reads `stale`, in `stale_layout`, instead of z, if it is given. The denoiser's input is then
        corrected by what has changed since: the residual stream contains the embedded ids, so the difference of the two
        is added. The anchor network also reads `memory`, as in `Transformer.hidden`.
        """
        embedded, anchor_layout = self.anchor.embedding(z), layout
        current = embedded
        if stale is not None:
            embedded, anchor_layout = self.anchor.embedding(stale), stale_layout
        read = embedded if memory is None else self.anchor.embedded(z, memory)
        stream = self.anchor.trunk.residual_stream(
            read, sigma, pad, None, self.early_blocks, anchor_layout, keep_states
        )
        anchor_hidden = self.anchor.trunk.finish(stream.last, stream.condition)
        early = None if self.early is None else self.early.trunk.finish(stream.early, stream.condition)
        if self.denoiser is None:
            return PairHidden(anchor_hidden, anchor_hidden, early, stream.states)
        bridge = self.denoiser.bridge
        bridge_input = stream.last if bridge.continues_stream else anchor_hidden
        bridged = (cross or bridge)(bridge_input, self.anchor.head).to(anchor_hidden.dtype)
        if bridge.adds_input:
            bridged = bridged + embedded
        if stale is not None:
            bridged = bridged + (current - embedded)
        condition = stream.condition if bridge.continues_stream else None
        hidden, states = self.denoiser.trunk.hidden_and_states(bridged, sigma, pad, condition, layout, keep_states)
        return PairHidden(anchor_hidden, hidden, early, stream.states + states)

    @property
    def head(self) -> Head:
        """The denoiser's."""
        return self.anchor.head if self.denoiser is None else self.denoiser.head

    @property
    def embedding(self) -> nn.Embedding:
        return self.anchor.embedding

    def hidden(
        self,
        z: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        first_block: int | None = None,
        stale: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """The denoiser's states; `stale` as in `score`, `memory` as in `Transformer.hidden`."""
        blocks = self.anchor.text_blocks
        if blocks is None:
            return self._hidden(z, sigma, pad, stale=stale, memory=memory).denoiser
        places = blocks.places(z, z, pad, first_block)
        read, read_layout = _read_places(blocks, z, stale, pad, first_block)
        hidden = self._hidden(places.ids, None, None, layout=places.layout, stale=read, stale_layout=read_layout)
        return places.noisy(hidden.denoiser)

    def forward(
        self,
        z: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        first_block: int | None = None,
        stale: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """The denoiser's logits; `stale` and `memory` as in `hidden`."""
        return self.head(self.hidden(z, sigma, pad, first_block, stale, memory))  # type: ignore[no-any-return]

    def to_remember(
        self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """As `Transformer.to_remember`, of the anchor network."""
        return self.anchor.to_remember(z, sigma, pad, memory)

    def causal_logits(self, x: Tensor) -> Tensor:
        """As `Transformer.causal_logits`, by the pair."""
        assert self.anchor.text_blocks is not None
        places = self.anchor.text_blocks.places(x, x)
        hidden = self._hidden(places.ids, None, None, layout=places.layout).denoiser
        return self.head(places.clean(hidden))  # type: ignore[no-any-return]

    def anchor_logits(
        self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """The anchor network's logits alone."""
        return self.anchor(z, sigma, pad, memory=memory)  # type: ignore[no-any-return]

    def score(
        self,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        anchor_weight: Tensor | None = None,
        mask_id: int | None = None,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        options: ScoreOptions = NO_OPTIONS,
    ) -> tuple[Scored, Scored | None]:
        """The denoiser's cross-entropy where `weight` (B, L) is not 0, the anchor's where `anchor_weight` is not.

        The anchor's total includes that of the second anchor head, if there is one.
        The denoiser's softmax excludes `mask_id` (SUBS); the anchor network's is over all V symbols, as published.
        All parameters are read within this one call, as FSDP2 requires of a wrapped method.
        """
        positions = Positions(weight)
        anchor_positions = None if anchor_weight is None else Positions(anchor_weight)
        blocks, last_call = self.anchor.text_blocks, options.last_call
        if blocks is None:
            memory = None if last_call is None else last_call.memory(self.anchor.hidden, sigma, pad)
            hidden = self._hidden(z, sigma, pad, stale=options.stale, memory=memory)
        else:
            places = blocks.places(x, z, pad, options.first_block)
            read, read_layout = _read_places(blocks, x, options.stale, pad, options.first_block)
            keep_states = options.align_weight is not None
            both = self._hidden(places.ids, None, None, None, places.layout, read, read_layout, keep_states)
            early = None if both.early is None else places.noisy(both.early)
            hidden = PairHidden(places.noisy(both.anchor), places.noisy(both.denoiser), early, [])
        if options.planner is not None:
            with torch.no_grad():
                nats = score_positions(hidden.anchor, self.anchor.head, x, weight, mask_id, positions).nats
            weight = options.planner.weight(weight, nats)
        scored = score_positions(hidden.denoiser, self.head, x, weight, mask_id, positions)
        scored = replace(scored, log_rates=None if self.rates is None else self.rates.of_masks(hidden.anchor))
        if blocks is not None:  # stale places have the same outputs
            scored = score_copies(scored, self, x, mask_id, places, both.denoiser, both.states, options)
        if anchor_weight is None:
            return scored, None
        anchor = score_positions(hidden.anchor, self.anchor.head, x, anchor_weight, positions=anchor_positions)
        if self.early is not None and hidden.early is not None:
            early_scored = score_positions(hidden.early, self.early.head, x, anchor_weight, positions=anchor_positions)
            anchor = replace(anchor, total=anchor.total + early_scored.total)
        return scored, anchor

    def log_rates(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        """As `Transformer.log_rates`, by the anchor network."""
        assert self.rates is not None
        return self.rates.of_masks(self.anchor.hidden(z, sigma, pad))

    def text_rates(self, x: Tensor, pad: Tensor | None = None) -> TextRates:
        """As `Transformer.text_rates`."""
        assert self.rates is not None
        return self.rates.of_text(x, self.embedding(x), pad)

    def plain_score(
        self, z: Tensor, x: Tensor, weight: Tensor, anchor_weight: Tensor, mask_id: int | None = None
    ) -> tuple[Scored, Scored]:
        """`score` with the logits bridge unfolded and all logits computed: the test oracle."""
        assert self.denoiser is not None
        hidden = self._hidden(z, None, None, self.denoiser.bridge.unfolded)
        return (
            _plain_score(hidden.denoiser, self.denoiser.head, x, weight, mask_id),
            _plain_score(hidden.anchor, self.anchor.head, x, anchor_weight, None),
        )


def _read_places(
    blocks: TextBlocks, x: Tensor, stale: Tensor | None, pad: Tensor | None, first_block: int | None
) -> tuple[Tensor | None, Layout | None]:
    """What the anchor network of a block-causal pair reads in place of the noisy copy: ids of places, their layout."""
    if stale is None:
        return None, None
    places = blocks.places(x, stale, pad, first_block)
    return places.ids, places.layout


@torch.no_grad()
def start_from_unigram(network: nn.Module, log_probs: Tensor) -> None:
    """Initialize the bias of every head of a new network so that it predicts exp(log_probs) (V,) for every input.

    The heads' weights start at 0. A head whose bias starts at 0 too learns the unigram frequencies first, through the
    embedding that all masked positions share; that vector grows, the norms then suppress the differences between
    positions, and the loss stays at the unigram entropy for long. log(V - 1) is added to each bias, which leaves the
    softmax unchanged and makes SEDD's scores sum to the required value. The output of a bridge that reads the anchor
    logits stays what it was.
    """
    for name, layer in network.named_modules():
        if name.rpartition(".")[2] == "head":
            assert isinstance(layer, Head)
            layer.bias.copy_(log_probs + math.log(len(log_probs) - 1))
    if isinstance(network, AnchoredTransformer) and network.denoiser is not None:
        network.denoiser.bridge.subtract_bias(network.anchor.head)


def _plain_score(hidden: Tensor, head: Head, x: Tensor, weight: Tensor, excluded: int | None) -> Scored:
    flat = plain_linear_cross_entropy(
        hidden.flatten(0, 1), head.weight, head.bias, x.flatten(), weight.flatten(), excluded
    )
    return Scored(flat.total, flat.nats.view(x.shape) * (weight != 0))
