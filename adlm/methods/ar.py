"""AR: one causal network predicts each token from those before it. Its nats are exact, not a bound.

The first token of a row is given (packed rows begin with bos), so L tokens are L - 1 predictions.

Shapes: B sequences, L tokens, V symbols.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.times import BatchRng
from adlm.methods.causal import Causal
from adlm.methods.inputs import vocabulary_of
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer


@dataclass(frozen=True)
class Ar(Causal):
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"

    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, causal=True, modulated=False)

    def loss(self, network: Transformer, x: Tensor, pad: Tensor | None, progress: float, rng: BatchRng) -> Loss:
        """The cross-entropy of every next token. Draws no random numbers."""
        predicted = self.predicted(x, pad)
        weight = predicted[:, 1:].float()
        scored = network.score(x[:, :-1], x[:, 1:], weight, vocabulary_of(self.config).mask_id)
        parts = {"nll": scored.total.detach()}
        return Loss(scored.total, F.pad(scored.nats, (1, 0)), predicted.sum(), parts)
