"""One transformer, bidirectional or causal, with or without time conditioning. Independent of masks and anchors.

Shapes: B sequences, L tokens, d wide, V symbols. `pad` is True at padding.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adlm.config.schema import Model
from adlm.models.heads import Positions, Scored, nats_at_positions, score_positions
from adlm.models.layers import (
    Block,
    LayerNorm,
    TimeCondition,
    attend_neighbours,
    modulate,
    rotary_angles,
    zero_linear,
)


class Trunk(nn.Module):
    """Embedded tokens (B, L, d) -> final hidden states (B, L, d), normed and modulated, ready for a head.

    The blocks and `finish` have static shapes and do nearly all the work: they are the parts to compile. The rotary
    angles are computed outside them: the compiler would recompute every cosine for every query and key.
    """

    def __init__(self, model: Model, blocks: int, causal: bool, modulated: bool):
        super().__init__()
        condition = model.condition if modulated else None
        self.head_width = model.hidden // model.heads
        self.condition = TimeCondition(model.condition) if modulated else None
        layers = [Block(model.hidden, model.heads, condition, model.dropout, causal) for _ in range(blocks)]
        if modulated and model.start == "neighbours":
            for block in layers:
                attend_neighbours(block)
        self.blocks = nn.ModuleList(layers)
        self.norm = LayerNorm(model.hidden)
        self.modulation = zero_linear(model.condition, 2 * model.hidden) if modulated else None

    def forward(self, h: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        """sigma (B,) is the noise level for time-conditioned networks; None conditions every sequence on 0."""
        angles = rotary_angles(h.shape[1], self.head_width, like=h)
        visible = None if pad is None else attendable(pad)
        condition = None
        if self.condition is not None:
            precise = torch.float64 if h.dtype == torch.float64 else torch.float32
            condition = self.condition(h.new_zeros(1, dtype=precise) if sigma is None else sigma.to(precise))
        for block in self.blocks:
            h = block(h, angles, condition, visible)
        return self.finish(h, condition)

    def finish(self, h: Tensor, condition: Tensor | None) -> Tensor:
        """The final norm, modulated."""
        if self.modulation is None:
            return self.norm(h)  # type: ignore[no-any-return]
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return modulate(self.norm(h), shift, scale)


def attendable(pad: Tensor) -> Tensor:
    """Keys that may be attended to, (B, 1, 1, L): all but padding; all in a row of only padding, to avoid NaN."""
    return (~pad | pad.all(dim=-1, keepdim=True))[:, None, None, :]


class Transformer(nn.Module):
    """ids (B, L) -> logits (B, L, V). Embedding and head are not tied."""

    def __init__(self, model: Model, num_symbols: int, causal: bool = False, modulated: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, model.hidden)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))
        self.trunk = Trunk(model, model.blocks, causal, modulated)
        self.head = zero_linear(model.hidden, num_symbols)

    def hidden(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        return self.trunk(self.embedding(z), sigma, pad)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(z, sigma, pad))  # type: ignore[no-any-return]

    def score(
        self,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        mask_id: int | None = None,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
    ) -> Scored:
        """The cross-entropy of x given z where `weight` (B, L) is not 0, normalised over all symbols but `mask_id`.

        The head runs at those positions only. All parameters are read within this one call, as FSDP2 requires of a
        wrapped method.
        """
        positions = Positions(weight)
        return score_positions(self.hidden(z, sigma, pad), self.head, x, weight, mask_id, positions)

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
