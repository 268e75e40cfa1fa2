"""ADLM: an anchor network names the important tokens, a denoiser restores the rest from it, trained with the ANELBO.

[ADLM Eq. 7]: the NELBO of the composed network + gamma * the same weight * the anchor network's cross-entropy at
anchors. With gamma 0 and no second network this is MDLM, to the last bit.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.anchors import anchor_mask
from adlm.diffusion.objectives import anchor_gamma, anchor_weight
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.masked_diffusion import Noised
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.sampling.frame import Frame


@dataclass(frozen=True)
class Adlm:
    config: Config

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, diffusion.vocabulary_of(self.config).size)

    def loss(
        self, network: AnchoredTransformer, x: Tensor, pad: Tensor | None, progress: float, generator: torch.Generator
    ) -> Loss:
        diffusion.check_clean(x, diffusion.vocabulary_of(self.config))
        noised = diffusion.noise(self.config, x, pad, generator, self.config.time.t_min)
        return self.loss_at(network, x, noised, pad, progress)

    def loss_at(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        noised: Noised,
        pad: Tensor | None = None,
        progress: float = 1.0,
    ) -> Loss:
        """The loss at a given noising. The perplexity of a run is that of `nats`: the anchor term is not in it."""
        config, vocabulary = self.config, diffusion.vocabulary_of(self.config)
        base = diffusion.weight(config, noised)
        masked = diffusion.masked_positions(config, noised.z, pad)
        at_anchors = None
        if config.anchor.gamma > 0:
            anchors = anchor_mask(x, config.anchor.tau, vocabulary.size, pad)
            at_anchors = anchor_weight(base, anchors, masked, config.anchor.positions)
        scored, anchor_scored = network.score(
            noised.z,
            x,
            base * masked,
            at_anchors,
            vocabulary.mask_id,
            diffusion.told_sigma(config, noised.t, x.device),
            diffusion.seen_pad(config, pad),
        )
        total, parts = scored.total, {"nelbo": scored.total.detach()}
        if anchor_scored is not None:
            gamma = anchor_gamma(config.anchor.gamma, progress, config.anchor.warm_up)
            total = total + gamma * anchor_scored.total
            parts["anchor"] = anchor_scored.total.detach()
        return Loss(total, base * masked * scored.nats, diffusion.num_tokens(x, pad), parts)

    @torch.no_grad()
    def bound(self, network: AnchoredTransformer, x: Tensor, pad: Tensor | None, generator: torch.Generator) -> Tensor:
        mask_id = diffusion.vocabulary_of(self.config).mask_id

        def nats_at(z: Tensor, where: Tensor, sigma: Tensor | None, pad: Tensor | None) -> Tensor:
            return network.score(z, x, where.float(), None, mask_id, sigma, pad)[0].nats

        with diffusion.evaluating(network):
            return diffusion.bound(self.config, nats_at, x, pad, generator)

    def generate(
        self, network: AnchoredTransformer, canvas: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Iterator[Frame]:
        return diffusion.generate(self.config, network, canvas, sampling, generator)
