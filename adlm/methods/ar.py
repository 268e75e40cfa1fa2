"""AR: one causal network predicts each token from those before it. Its nats are exact, not a bound.

The first token of a row is given (it is bos, as rows are packed), so L tokens are L - 1 predictions.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.times import BatchSlice
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import causal as left_to_right
from adlm.methods.inputs import check_clean, eval_mode, vocabulary_of
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Ar:
    config: Config
    exact: ClassVar[bool] = True

    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, causal=True, modulated=False)

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        return left_to_right.predicted(x, pad)

    def loss(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Loss:
        """The cross-entropy of every next token. Nothing is drawn."""
        check_clean(self.config, x, pad)
        predicted = self.predicted(x, pad)
        weight = predicted[:, 1:].float()
        scored = network.score(x[:, :-1], x[:, 1:], weight, vocabulary_of(self.config).mask_id)
        parts = {"nll": scored.total.detach()}
        return Loss(scored.total, F.pad(scored.nats, (1, 0)), predicted.sum(), parts)

    @torch.no_grad()
    def bound(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Tensor:
        with eval_mode(network):
            return self.loss(network, x, pad, 1.0, generator).nats

    def log_beliefs(self, network: Transformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return left_to_right.log_beliefs(self.config, network, z)

    def generate(
        self,
        network: Transformer | FrozenNetwork,
        canvas: Tensor,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        return left_to_right.generate(self.config, network, canvas, sampling, draws, pad)
