"""ADLM: an anchor network names the important tokens, a denoiser restores the rest from it, trained with the ANELBO.

[ADLM Eq. 7]: the NELBO of the composed network + gamma * the same weight * the anchor network's cross-entropy at
anchors. With gamma 0 and no second network this is MDLM, to the last bit.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.anchors import anchor_mask
from adlm.diffusion.objectives import anchor_gamma, anchor_weight
from adlm.diffusion.times import BatchSlice
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import denoising
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.inputs import attention_pad, check_progress, eval_mode, not_pad, vocabulary_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import Scored
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Adlm:
    config: Config
    exact: ClassVar[bool] = False

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size)

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        return not_pad(x, pad)

    def loss(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Loss:
        noised = diffusion.noise(self.config, x, pad, generator, self.config.time.t_min, portion)
        return self.loss_at(network, x, noised, pad, progress)

    def loss_at(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        noised: NoisedBatch,
        pad: Tensor | None = None,
        progress: float = 1.0,
    ) -> Loss:
        """The loss at a given noising. The perplexity of a run is that of `nats`: the anchor term is not in it."""
        check_progress(progress)
        config, anchor = self.config, self.config.anchor
        base = diffusion.weight(config, noised)
        masked = diffusion.masked_positions(config, noised.z, pad)
        at_anchors = None
        if anchor.gamma > 0:
            anchors = anchor_mask(x, anchor.tau, vocabulary_of(config).size, pad)
            at_anchors = anchor_weight(base, anchors, masked, anchor.positions)
        scored, anchor_scored = self._score(network, x, noised, base * masked, at_anchors, pad)
        total, parts = scored.total, {"nelbo": scored.total.detach()}
        if anchor_scored is not None:
            total = total + anchor_gamma(anchor.gamma, progress, anchor.warm_up) * anchor_scored.total
            parts["anchor"] = anchor_scored.total.detach()
        return Loss(total, base * masked * scored.nats, self.predicted(x, pad).sum(), parts)

    @torch.no_grad()
    def bound(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        pad: Tensor | None,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Tensor:
        def last(noised: NoisedBatch) -> Tensor:
            return self.masked_nats(network, x, noised, pad)

        def nats_at(noised: NoisedBatch) -> Tensor:
            return diffusion.weight(self.config, noised) * last(noised)

        with eval_mode(network):
            return diffusion.bound(self.config, nats_at, x, pad, generator, last, portion)

    def masked_nats(self, network: AnchoredTransformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """-log p(x | z) of the denoiser at what is masked, (B, L); 0 elsewhere."""
        masked = diffusion.masked_positions(self.config, noised.z, pad)
        return self._score(network, x, noised, masked.float(), None, pad)[0].nats

    def log_beliefs(self, network: AnchoredTransformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return diffusion.log_beliefs(self.config, network, z, alpha)

    def generate(
        self,
        network: AnchoredTransformer | FrozenNetwork,
        canvas: Tensor,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        return denoising.generate(self.config, network, canvas, sampling, draws, pad)

    def _score(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        noised: NoisedBatch,
        weight: Tensor,
        anchor_weights: Tensor | None,
        pad: Tensor | None,
    ) -> tuple[Scored, Scored | None]:
        sigma = diffusion.conditioning_sigma(self.config, noised.t, x.device)
        mask_id = vocabulary_of(self.config).mask_id
        return network.score(noised.z, x, weight, anchor_weights, mask_id, sigma, attention_pad(self.config, pad))
