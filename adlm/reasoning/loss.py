"""The loss of a batch: next tokens of reasoning and answer, plus the anchor labels at the slots. No optimisation.

Shapes: B rows, L tokens, d wide, V symbols, N targets.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from adlm.reasoning.network import CausalLanguageModel, hidden_states
from adlm.reasoning.rows import ReasoningBatch


@dataclass(frozen=True)
class ReasoningLoss:
    """Sums over tokens; `total` carries the gradient."""

    total: Tensor
    """Cross-entropy of reasoning and answer + anchor_weight * cross-entropy of the anchor labels."""
    nats: Tensor
    """Of reasoning and answer."""
    anchor_nats: Tensor
    num_tokens: Tensor
    """Tokens of reasoning and answer: `total` is divided by these, so that anchors do not rescale the rest."""
    num_anchors: Tensor
    num_right_anchors: Tensor
    """Anchors whose label is the most likely token."""


def reasoning_loss(model: CausalLanguageModel, batch: ReasoningBatch, anchor_weight: float) -> ReasoningLoss:
    """The loss of a batch. Slots without a label have none, and with `anchor_weight` 0 no slot has."""
    hidden = hidden_states(model, batch)
    nats, _ = _cross_entropy(model, hidden, batch.ids, batch.predicted)
    anchor_nats, right = _cross_entropy(model, hidden, batch.ids, batch.anchors)
    total = nats.sum() if anchor_weight == 0 else nats.sum() + anchor_weight * anchor_nats.sum()
    return ReasoningLoss(
        total,
        nats.sum().detach(),
        anchor_nats.sum().detach(),
        batch.predicted.sum(),
        batch.anchors.sum(),
        right.sum(),
    )


def _cross_entropy(model: CausalLanguageModel, hidden: Tensor, ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """-log p (N,) of the ids at `where` (B, L) given what stands before them, and whether each is the most likely."""
    logits = model.logits(hidden[:, :-1][where[:, 1:]]).float()
    targets = ids[where]
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(dim=-1) == targets
