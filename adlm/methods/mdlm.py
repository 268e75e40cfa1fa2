"""MDLM: one bidirectional network restores masked tokens, trained with the NELBO.  [ADLM Eq. 4]

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.masked_diffusion import Noised
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame


@dataclass(frozen=True)
class Mdlm:
    config: Config

    def build(self) -> Transformer:
        return Transformer(self.config.model, diffusion.vocabulary_of(self.config).size)

    def loss(
        self, network: Transformer, x: Tensor, pad: Tensor | None, progress: float, generator: torch.Generator
    ) -> Loss:
        diffusion.check_clean(x, diffusion.vocabulary_of(self.config))
        return self.loss_at(network, x, diffusion.noise(self.config, x, pad, generator, self.config.time.t_min), pad)

    def loss_at(self, network: Transformer, x: Tensor, noised: Noised, pad: Tensor | None = None) -> Loss:
        """The loss at a given noising: the NELBO's weight times the cross-entropy of what is masked."""
        config = self.config
        weight = diffusion.weight(config, noised) * diffusion.masked_positions(config, noised.z, pad)
        scored = network.score(
            noised.z,
            x,
            weight,
            diffusion.vocabulary_of(config).mask_id,
            diffusion.told_sigma(config, noised.t, x.device),
            diffusion.seen_pad(config, pad),
        )
        parts = {"nelbo": scored.total.detach()}
        return Loss(scored.total, weight * scored.nats, diffusion.num_tokens(x, pad), parts)

    @torch.no_grad()
    def bound(self, network: Transformer, x: Tensor, pad: Tensor | None, generator: torch.Generator) -> Tensor:
        mask_id = diffusion.vocabulary_of(self.config).mask_id

        def nats_at(z: Tensor, where: Tensor, sigma: Tensor | None, pad: Tensor | None) -> Tensor:
            return network.score(z, x, where.float(), mask_id, sigma, pad).nats

        with diffusion.evaluating(network):
            return diffusion.bound(self.config, nats_at, x, pad, generator)

    def generate(
        self, network: Transformer, canvas: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Iterator[Frame]:
        return diffusion.generate(self.config, network, canvas, sampling, generator)
