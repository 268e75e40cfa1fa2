"""A2R: anchoring left to right. A causal anchor network, a bridge, a causal network of half the depth.

The next-token cross-entropy of the second network + gamma * that of the anchor network at targets that are anchors.
With gamma 0 and no second network this is AR, to the last bit.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.anchors import anchor_mask
from adlm.diffusion.objectives import anchor_gamma
from adlm.diffusion.times import BatchSlice
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import causal as left_to_right
from adlm.methods.inputs import check_clean, check_progress, eval_mode, vocabulary_of
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class A2r:
    config: Config
    exact: ClassVar[bool] = True

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size, causal=True, modulated=False)

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        return left_to_right.predicted(x, pad)

    def loss(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Loss:
        """Nothing is drawn. The perplexity of a run is that of `nats`: the anchor term is not in it."""
        vocabulary, anchor = vocabulary_of(self.config), self.config.anchor
        check_clean(self.config, x, pad)
        check_progress(progress)
        predicted = self.predicted(x, pad)
        weight, at_anchors = predicted[:, 1:].float(), None
        if anchor.gamma > 0:
            at_anchors = weight * anchor_mask(x, anchor.tau, vocabulary.size, pad)[:, 1:]
        scored, anchor_scored = network.score(x[:, :-1], x[:, 1:], weight, at_anchors, vocabulary.mask_id)
        total, parts = scored.total, {"nll": scored.total.detach()}
        if anchor_scored is not None:
            total = total + anchor_gamma(anchor.gamma, progress, anchor.warm_up) * anchor_scored.total
            parts["anchor"] = anchor_scored.total.detach()
        return Loss(total, F.pad(scored.nats, (1, 0)), predicted.sum(), parts)

    @torch.no_grad()
    def bound(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        pad: Tensor | None,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Tensor:
        with eval_mode(network):
            return self.loss(network, x, pad, 1.0, generator).nats

    def log_beliefs(self, network: AnchoredTransformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return left_to_right.log_beliefs(self.config, network, z)

    def generate(
        self,
        network: AnchoredTransformer | FrozenNetwork,
        canvas: Tensor,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        return left_to_right.generate(self.config, network, canvas, sampling, draws, pad)
