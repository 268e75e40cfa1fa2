"""How soon tokens are revealed: log rates of masked tokens, and of the tokens of a clean text. No losses.

The order of a masked model is a part of it here. Its sampler reveals next one of the masked tokens, each with a
probability in proportion to its rate, which the network predicts (`of_masks`). Training draws orders in the same way
from rates of the clean text (`of_text`).

Shapes: B sequences, L tokens, d wide, V symbols.
"""

import math

import torch
from torch import Tensor, nn

from adlm.config.schema import Model, Rates
from adlm.models.transformer import Trunk, zero_linear

MAX_LOG_RATE = 5.0
"""Rates that a network gives to the tokens of a text are from exp(-5) to exp(5)."""


class RevealRates(nn.Module):
    """All rates are 1 at first, except those of a table that `set_table` fills."""

    def __init__(self, model: Model, rates: Rates, num_symbols: int):
        super().__init__()
        self.rule, self.strength = rates.rule, rates.strength
        self.masks = zero_linear(model.hidden, 1)
        self.table, self.reader, self.text = None, None, None
        if rates.rule in ("anchors", "tokens"):
            self.table = nn.Parameter(torch.zeros(num_symbols))
        if rates.rule == "text":
            self.reader = Trunk(model, rates.blocks, causal=False, modulated=True)
            self.text = zero_linear(model.hidden, 1)

    @torch.no_grad()
    def set_table(self, is_anchor: Tensor) -> None:
        """Anchors (V,) have the rate `rates.strength`."""
        assert self.table is not None
        self.table.copy_(is_anchor * math.log(self.strength))

    def of_masks(self, hidden: Tensor) -> Tensor:
        """log rates (...) from hidden states (..., d) of masked tokens."""
        return _product(self.masks, hidden)

    def of_text(self, x: Tensor, embedded: Tensor, pad: Tensor | None) -> Tensor:
        """log rates (B, L) of clean ids; with a gradient for the rules that learn them."""
        if self.table is not None:
            rates = self.table[x]
            return rates if self.rule == "tokens" else rates.detach()
        if self.reader is not None and self.text is not None:
            raw = _product(self.text, self.reader(embedded.detach(), None, pad))
            return MAX_LOG_RATE * torch.tanh(raw / MAX_LOG_RATE)
        share = torch.arange(x.shape[1], device=x.device, dtype=self.masks.weight.dtype) / x.shape[1]
        return (-math.log(self.strength) * share).expand(x.shape)  # rule position


def _product(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """layer(hidden)[..., 0], in full precision under autocast too: softmax over a row needs more than 8 bits."""
    return (hidden.to(layer.weight.dtype) * layer.weight[0]).sum(dim=-1) + layer.bias[0]
