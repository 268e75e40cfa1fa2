"""The loss of a batch: next tokens of reasoning and answer, plus the anchor labels at the slots. No optimisation.

Shapes: B rows, L tokens, d wide, V symbols, N targets.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adlm.apps.reasoning.methods import REASONING_METHODS, ReasoningMethod
from adlm.apps.reasoning.network import CausalLanguageModel, hidden_states
from adlm.apps.reasoning.rows import ReasoningBatch, SpecialIds, as_batch, between_markers
from adlm.config.schema import Config, Reason
from adlm.diffusion.times import BatchRng
from adlm.methods.method import Loss

# cuDNN attention, which training on text prefers, is slow at the first step of a shape, and these batches have many:
# 8.4 s, then 1.6 s a step, against 1.5 and 1.4 s with this kernel (H200, shared with another process; 30 layers, 128
# rows of 416 tokens, 6 slots). Without slots, once warm, a step takes 0.33 s with cuDNN and 0.35 s with this kernel.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class ReasoningObjective:
    """What a training step minimises: see `training.step.Objective`. `pad` is True where nothing is predicted."""

    config: Config
    ids: SpecialIds
    exact: ClassVar[bool] = True

    @property
    def reason(self) -> Reason:
        assert self.config.reason is not None
        return self.config.reason

    @property
    def reasoning_method(self) -> ReasoningMethod:
        return REASONING_METHODS[self.reason.method]

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        """(B, L), True at reasoning and answer: the loss is divided by these, so anchors do not rescale the rest."""
        assert pad is not None
        return ~pad & ~between_markers(x, self.ids)

    def loss(self, network: Any, x: Tensor, pad: Tensor | None, progress: float, rng: BatchRng) -> Loss:
        assert pad is not None
        batch = as_batch(x, pad, self.ids, self.reasoning_method)
        with sdpa_kernel(ATTENTION):
            return reasoning_loss(network, batch, self.reason.anchor_weight if self.reasoning_method.labelled else 0.0)


def reasoning_loss(model: CausalLanguageModel, batch: ReasoningBatch, anchor_weight: float) -> Loss:
    """Cross-entropy of reasoning and answer + anchor_weight * cross-entropy of the anchor labels.

    Slots without a label have no loss, and with `anchor_weight` 0 no slot has. `parts["anchors"]` is the cross-entropy
    of the labels without its weight.
    """
    hidden = hidden_states(model, batch)
    nats = _cross_entropy(model, hidden, batch.ids, batch.predicted)
    total, parts = nats.sum(), {"answer": nats.sum().detach()}
    if anchor_weight:
        anchor_nats = _cross_entropy(model, hidden, batch.ids, batch.anchors).sum()
        total, parts["anchors"] = total + anchor_weight * anchor_nats, anchor_nats.detach()
    by_position = torch.zeros(batch.ids.shape, dtype=nats.dtype, device=nats.device)
    by_position[batch.predicted] = nats.detach()
    return Loss(total, by_position, batch.predicted.sum(), parts)


def _cross_entropy(model: CausalLanguageModel, hidden: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-log p (N,) of the ids at `where` (B, L) given what stands before them."""
    logits = model.logits(hidden[:, :-1][where[:, 1:]]).float()
    return F.cross_entropy(logits, ids[where], reduction="none")
