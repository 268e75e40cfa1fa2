"""A2R: anchored autoregression. A causal anchor network, a bridge, a causal network of half the depth.

The next-token cross-entropy of the second network + gamma * that of the anchor network at targets that are anchors.
With gamma 0 and no second network this is AR, to the last bit.

Shapes: B sequences, L tokens, V symbols.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.times import BatchRng
from adlm.methods.adlm import Anchored
from adlm.methods.ar import Causal
from adlm.methods.inputs import vocabulary_of
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer


@dataclass(frozen=True)
class A2r(Anchored, Causal):
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size, causal=True, modulated=False)

    def loss(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Loss:
        """Draws no random numbers. The reported perplexity is that of `nats`, which leaves the anchor term out."""
        vocabulary = vocabulary_of(self.config)
        predicted = self.predicted(x, pad, given)
        weight, anchor_weights, gamma = predicted[:, 1:].float(), None, self.gamma_at(progress)
        if gamma is not None:
            anchors = predicted & self.anchors(x, pad, labels)
            anchor_weights = anchors[:, 1:].float()
        scored, anchor_scored = network.score(x[:, :-1], x[:, 1:], weight, anchor_weights, vocabulary.mask_id)
        total, parts = scored.total, {"nll": scored.total.detach()}
        if gamma is not None and anchor_scored is not None:
            total = total + gamma * anchor_scored.total
            parts |= {"anchor": anchor_scored.total.detach(), "anchor_share": anchors.sum()}
        return Loss(total, F.pad(scored.nats, (1, 0)), predicted.sum(), parts)

    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """Without the anchor term, which may need statistics or labels of the training text."""
        config = replace(self.config, anchor=replace(self.config.anchor, gamma=0.0))
        return Causal.bound(replace(self, config=config), network, x, pad, rng, given)
