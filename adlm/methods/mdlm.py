"""MDLM: one bidirectional network restores masked tokens, trained with the NELBO.  [ADLM Eq. 4]

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.times import BatchSlice
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import denoising
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.inputs import attention_pad, eval_mode, not_pad, vocabulary_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.methods.method import Loss
from adlm.models.heads import Scored
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Mdlm:
    config: Config
    exact: ClassVar[bool] = False

    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size)

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        return not_pad(x, pad)

    def loss(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Loss:
        noised = diffusion.noise(self.config, x, pad, generator, self.config.time.t_min, portion)
        return self.loss_at(network, x, noised, pad)

    def loss_at(self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None) -> Loss:
        """The loss at a given noising: the NELBO's weight times the cross-entropy of what is masked."""
        weight = diffusion.weight(self.config, noised) * diffusion.masked_positions(self.config, noised.z, pad)
        scored = self._score(network, x, noised, weight, pad)
        parts = {"nelbo": scored.total.detach()}
        return Loss(scored.total, weight * scored.nats, self.predicted(x, pad).sum(), parts)

    @torch.no_grad()
    def bound(
        self,
        network: Transformer,
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

    def masked_nats(self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """-log p(x | z) at what is masked, (B, L); 0 elsewhere."""
        masked = diffusion.masked_positions(self.config, noised.z, pad)
        return self._score(network, x, noised, masked.float(), pad).nats

    def log_beliefs(self, network: Transformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return diffusion.log_beliefs(self.config, network, z, alpha)

    def generate(
        self,
        network: Transformer | FrozenNetwork,
        canvas: Tensor,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        return denoising.generate(self.config, network, canvas, sampling, draws, pad)

    def _score(
        self, network: Transformer, x: Tensor, noised: NoisedBatch, weight: Tensor, pad: Tensor | None
    ) -> Scored:
        sigma = diffusion.conditioning_sigma(self.config, noised.t, x.device)
        mask_id = vocabulary_of(self.config).mask_id
        return network.score(noised.z, x, weight, mask_id, sigma, attention_pad(self.config, pad))
