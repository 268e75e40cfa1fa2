"""How soon tokens are revealed: log rates of masked tokens, and of the tokens of a clean text. No losses.

The order of a masked model is a part of it here. Its sampler reveals next one of the masked tokens, each with a
probability in proportion to its rate, which the network predicts (`of_masks`). Training draws orders in the same way
from rates of the clean text (`of_text`).

Shapes: B sequences, L tokens, d wide, V symbols.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.config.schema import Model, Rates
from adlm.models.transformer import Trunk, zero_linear

MAX_LOG_RATE = 5.0
"""Learnt rates of the tokens of a text are from exp(-5) to exp(5)."""
TABLE_STEP = 8.0
"""A table's entries are multiplied by it, or they would move by no more than a learning rate at every step."""
GRADIENT = 0.01
"""Gradients of learnt rates are multiplied by it: they are noisy, and would dominate the norm that is clipped."""


@dataclass(frozen=True)
class TextRates:
    """Of a clean text."""

    log_rates: Tensor
    """(B, L), of its tokens; with a gradient if they are learnt."""
    level: Tensor | None = None
    """(B, L), for learnt rates: level + slope * t predicts what each token costs at a share t of masks, in nats."""
    slope: Tensor | None = None
    """(B, L)"""


class RevealRates(nn.Module):
    """All rates are 1 at first, except those of a table that `set_table` fills."""

    def __init__(self, model: Model, rates: Rates, num_symbols: int):
        super().__init__()
        self.rule, self.strength = rates.rule, rates.strength
        self.masks = zero_linear(model.hidden, 1)
        self.table, self.reader, self.text = None, None, None
        if rates.rule in ("anchors", "tokens"):
            self.table = nn.Parameter(torch.zeros(num_symbols, 1 if rates.rule == "anchors" else 3))
        if rates.rule == "text":
            self.reader = Trunk(model, rates.blocks, causal=False, modulated=True)
            self.text = zero_linear(model.hidden, 3)

    @torch.no_grad()
    def set_table(self, is_anchor: Tensor) -> None:
        """Anchors (V,) have the rate `rates.strength`."""
        assert self.table is not None
        self.table[:, 0] = is_anchor * math.log(self.strength)

    def of_masks(self, hidden: Tensor) -> Tensor:
        """log rates (...) from hidden states (..., d) of masked tokens."""
        return _precisely(self.masks, hidden)[..., 0]

    def of_text(self, x: Tensor, embedded: Tensor, pad: Tensor | None) -> TextRates:
        """Those of clean ids x, embedded (B, L, d)."""
        if self.rule == "position":
            share = torch.arange(x.shape[1], device=x.device, dtype=self.masks.weight.dtype) / x.shape[1]
            return TextRates((-math.log(self.strength) * share).expand(x.shape))
        if self.rule == "anchors":
            assert self.table is not None
            return TextRates(F.embedding(x, self.table)[..., 0].detach())
        if self.table is not None:
            learnt = TABLE_STEP * F.embedding(x, self.table)
        else:
            assert self.reader is not None
            assert self.text is not None
            learnt = _precisely(self.text, self.reader(embedded.detach(), None, pad))
        rate, level, slope = (GRADIENT * learnt + (1 - GRADIENT) * learnt.detach()).unbind(dim=-1)
        return TextRates(MAX_LOG_RATE * torch.tanh(rate / MAX_LOG_RATE), level, slope)


def _precisely(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """layer(hidden), in full precision under autocast too: softmax over a row needs more than 8 bits."""
    with torch.autocast(hidden.device.type, enabled=False):
        return layer(hidden.to(layer.weight.dtype))  # type: ignore[no-any-return]
