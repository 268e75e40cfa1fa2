"""Bridges: from the anchor network's hidden states to the denoiser's input. Each is one class, frozen form included.

Shapes: B sequences, L tokens, d wide, V symbols.
"""

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adlm.models.heads import MAX_LOGITS, Head

MAX_FROZEN_LOGITS = 2**25  # per chunk of the frozen mixture bridge: 128 MB in float32

FrozenBridge = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""(hidden (B, L, d), function from rows (N, d) to anchor logits (N, V)) -> the denoiser's input (B, L, d)."""


class Bridge(nn.Module):
    """A subclass takes (num_symbols, width) and defines `forward`."""

    continues_stream: ClassVar[bool] = False
    """Whether `forward` is given the residual stream before the anchor network's final norm instead of its final hidden
    states, and the denoiser shares the anchor network's time condition."""
    adds_input: ClassVar[bool] = False
    """Whether the embedded noisy ids, as the anchor network reads them, are added to the output."""

    def start_as_identity(self, head: Head) -> None:
        """Initialize the bridge, and if need be the anchor head, to pass the hidden states on; not all bridges can."""

    def subtract_bias(self, head: Head) -> None:
        """Undo what a new bias of the anchor head changed in the output, if the bridge reads logits linearly."""

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        """The denoiser's input (B, L, d) from the anchor network's final hidden states (B, L, d) and its head."""
        raise NotImplementedError

    def unfolded(self, hidden: Tensor, head: Head) -> Tensor:
        """The plain form of `forward`, where it has a faster one: the test oracle."""
        return self(hidden, head)  # type: ignore[no-any-return]

    def frozen(self, head: Head, dtype: torch.dtype) -> FrozenBridge:
        """`forward` for sampling, on copies of the weights in `dtype`. Subclasses may override it with a faster one."""
        bridge, frozen_head = copy.deepcopy(self).to(dtype), copy.deepcopy(head).to(dtype)
        return lambda hidden, logits: bridge(hidden, frozen_head)


class HiddenBridge(Bridge):
    """Linear(d -> d) of the anchor network's final hidden states; its head is not used."""

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        layer = nn.Linear(width, width)
        self.weight, self.bias = layer.weight, layer.bias

    def start_as_identity(self, head: Head) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def frozen(self, head: Head, dtype: torch.dtype) -> FrozenBridge:
        return _frozen_linear(self.weight.detach(), self.bias.detach(), dtype)


class HiddenPlusInputBridge(HiddenBridge):
    """The same plus the embedded noisy ids, so that the denoiser also reads the text itself."""

    adds_input = True


class NoBridge(Bridge):
    """No layer: the denoiser continues the residual stream of the anchor network, and both share a time condition.

    The pair is then one network of `blocks` + `denoiser_blocks` blocks, and the anchor head with its norm an auxiliary
    head after block `blocks`: the control for deep supervision.
    """

    continues_stream = True

    def __init__(self, num_symbols: int, width: int):
        super().__init__()

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        return hidden

    def frozen(self, head: Head, dtype: torch.dtype) -> FrozenBridge:
        return lambda hidden, logits: hidden


class LogitsBridge(Bridge):
    """Linear(V -> d) of the anchor network's raw logits, as published: no softmax, no other path from z.

    The anchor head (d -> V) directly precedes it, so the two linear layers are folded into one of d x d:
    W2 (W1 h + b1) + b2 = (W2 W1) h + (W2 b1 + b2). No logits are computed, and gradients reach both factors.
    """

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        layer = nn.Linear(num_symbols, width)
        self.weight, self.bias = layer.weight, layer.bias

    @torch.no_grad()
    def start_as_identity(self, head: Head) -> None:
        """W2 W1 = 1: W1 small and random instead of 0, and W2 its pseudoinverse."""
        nn.init.normal_(head.weight, std=0.02)
        self.weight.copy_(torch.linalg.solve(head.weight.T @ head.weight, head.weight.T))
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def subtract_bias(self, head: Head) -> None:
        self.bias.sub_(self.weight @ head.bias)

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        return F.linear(hidden, self.weight @ head.weight, self.weight @ head.bias + self.bias)

    def unfolded(self, hidden: Tensor, head: Head) -> Tensor:
        """The two layers applied one after the other, through all logits."""
        return F.linear(head(hidden), self.weight, self.bias)

    def frozen(self, head: Head, dtype: torch.dtype) -> FrozenBridge:
        """Folded once, in float32 or float64."""
        wide = self.weight.detach().to(torch.promote_types(dtype, torch.float32))
        bias = wide @ head.bias.detach().to(wide) + self.bias.detach()
        return _frozen_linear(wide @ head.weight.detach().to(wide), bias, dtype)


class MixtureBridge(Bridge):
    """softmax(anchor logits) @ table (V, d): the expected embedding under the anchor network's distribution.

    Computed in chunks of positions, recomputed in the backward pass: only one chunk of logits exists at a time.
    """

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_symbols, width))
        nn.init.kaiming_uniform_(self.table, a=math.sqrt(5))

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        def mixture(rows: Tensor) -> Tensor:
            return F.softmax(head(rows), dim=-1) @ self.table

        chunks = torch.split(hidden.flatten(0, -2), max(1, MAX_LOGITS // len(self.table)))
        mixed = [checkpoint(mixture, chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(mixed).view(*hidden.shape[:-1], -1)

    def frozen(self, head: Head, dtype: torch.dtype) -> FrozenBridge:
        table = self.table.detach().to(dtype, copy=True)

        def mixture(hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
            chunks = torch.split(hidden.flatten(0, 1), max(1, MAX_FROZEN_LOGITS // len(table)))
            return torch.cat([logits(rows).softmax(dim=-1).to(table) @ table for rows in chunks]).view_as(hidden)

        return mixture


def _frozen_linear(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> FrozenBridge:
    frozen_weight, frozen_bias = weight.to(dtype, copy=True), bias.to(dtype, copy=True)
    return lambda hidden, logits: F.linear(hidden, frozen_weight, frozen_bias)
