"""The anchored pair: a network that names the important tokens, a bridge, a network that restores all tokens.

Knows nothing of masks, anchors or gamma: which positions count comes in as weights.

Shapes: B sequences, L tokens, d wide, V symbols. `pad` is True at padding.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adlm.config.schema import Model
from adlm.models.heads import LOGITS_AT_ONCE, Positions, Scored, plain_linear_cross_entropy, score_positions
from adlm.models.layers import zero_linear
from adlm.models.transformer import Transformer, Trunk


class LogitsBridge(nn.Module):
    """Linear(V -> d) of the anchor network's raw logits, as published: no softmax, no other path from z.

    The anchor head (d -> V) feeds it with nothing between, so the two are one map of d x d:
    W2 (W1 h + b1) + b2 = (W2 W1) h + (W2 b1 + b2). No logits are built, and gradients reach both factors.
    """

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        layer = nn.Linear(num_symbols, width)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        return F.linear(hidden, self.weight @ head.weight, self.weight @ head.bias + self.bias)

    def unfolded(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """The two layers one after the other, all logits built: the oracle."""
        return F.linear(head(hidden), self.weight, self.bias)


class HiddenBridge(nn.Module):
    """Linear(d -> d) of the anchor network's final hidden state, past its head."""

    def __init__(self, width: int):
        super().__init__()
        layer = nn.Linear(width, width)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class MixtureBridge(nn.Module):
    """softmax(anchor logits) times a table (V, d): the embedding the anchor network expects.

    By chunks of positions, recomputed in the backward pass: the logits of a chunk are all that is held.
    """

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_symbols, width))
        nn.init.kaiming_uniform_(self.table, a=math.sqrt(5))

    def forward(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        def mixture(rows: Tensor) -> Tensor:
            return F.softmax(head(rows), dim=-1) @ self.table

        chunks = torch.split(hidden.flatten(0, -2), max(1, LOGITS_AT_ONCE // len(self.table)))
        mixed = [checkpoint(mixture, chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(mixed).view(*hidden.shape[:-1], -1)


Bridge = LogitsBridge | HiddenBridge | MixtureBridge


BRIDGES: dict[str, Callable[[int, int], Bridge]] = {
    "logits": LogitsBridge,
    "hidden": lambda num_symbols, width: HiddenBridge(width),
    "mixture": MixtureBridge,
}


class Denoiser(nn.Module):
    """The second network: what the bridge hands over -> hidden states -> logits."""

    def __init__(self, model: Model, num_symbols: int, causal: bool, modulated: bool):
        super().__init__()
        self.bridge = BRIDGES[model.bridge](num_symbols, model.hidden)
        self.trunk = Trunk(model, model.num_denoiser_blocks, causal, modulated)
        self.head = zero_linear(model.hidden, num_symbols)


class AnchoredTransformer(nn.Module):
    """ids (B, L) -> anchor logits and denoiser logits (B, L, V). Nothing is decoded between the two.

    With no blocks for the second network there is none, and the anchor network's prediction is the pair's.
    """

    def __init__(self, model: Model, num_symbols: int, causal: bool = False, modulated: bool = True):
        super().__init__()
        self.anchor = Transformer(model, num_symbols, causal, modulated)
        self.denoiser = Denoiser(model, num_symbols, causal, modulated) if model.num_denoiser_blocks else None

    def _hidden(self, z: Tensor, sigma: Tensor | None, pad: Tensor | None) -> tuple[Tensor, Tensor]:
        anchor_hidden = self.anchor.hidden(z, sigma, pad)
        if self.denoiser is None:
            return anchor_hidden, anchor_hidden
        handed_over = self.denoiser.bridge(anchor_hidden, self.anchor.head).to(anchor_hidden.dtype)
        return anchor_hidden, self.denoiser.trunk(handed_over, sigma, pad)

    @property
    def _head(self) -> nn.Linear:
        return self.anchor.head if self.denoiser is None else self.denoiser.head

    def forward(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        """The denoiser's logits."""
        return self._head(self._hidden(z, sigma, pad)[1])  # type: ignore[no-any-return]

    def anchor_logits(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        """The anchor network's logits alone."""
        return self.anchor(z, sigma, pad)  # type: ignore[no-any-return]

    def score(
        self,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        anchor_weight: Tensor | None = None,
        mask_id: int | None = None,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
    ) -> tuple[Scored, Scored | None]:
        """The denoiser's cross-entropy where `weight` (B, L) is not 0, the anchor's where `anchor_weight` is not.

        The denoiser's sum leaves `mask_id` out (SUBS), the anchor network's runs over all V symbols, as published.
        One call holds all that reads a weight, so that FSDP2 can wrap it.
        """
        positions = Positions(weight)
        anchor_positions = None if anchor_weight is None else Positions(anchor_weight)
        anchor_hidden, hidden = self._hidden(z, sigma, pad)
        scored = score_positions(hidden, self._head, x, weight, mask_id, positions)
        if anchor_weight is None:
            return scored, None
        return scored, score_positions(anchor_hidden, self.anchor.head, x, anchor_weight, positions=anchor_positions)

    def plain_score(
        self, z: Tensor, x: Tensor, weight: Tensor, anchor_weight: Tensor, mask_id: int | None = None
    ) -> tuple[Scored, Scored]:
        """`score` as on paper, the logits bridge unfolded and all logits built: the oracle."""
        assert self.denoiser is not None
        hidden, bridge = self.anchor.hidden(z), self.denoiser.bridge
        handed_over = (bridge.unfolded if isinstance(bridge, LogitsBridge) else bridge)(hidden, self.anchor.head)
        handed_over = handed_over.to(hidden.dtype)
        return (
            _plain(self.denoiser.trunk(handed_over), self.denoiser.head, x, weight, mask_id),
            _plain(hidden, self.anchor.head, x, anchor_weight, None),
        )


def _plain(hidden: Tensor, head: nn.Linear, x: Tensor, weight: Tensor, excluded: int | None) -> Scored:
    flat = plain_linear_cross_entropy(
        hidden.flatten(0, 1), head.weight, head.bias, x.flatten(), weight.flatten(), excluded
    )
    return Scored(flat.total, flat.nats.view(x.shape) * (weight != 0))
