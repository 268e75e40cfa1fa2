"""D3PM with the absorbing process: T discrete steps, a time-conditioned network whose beliefs may include the mask.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.beliefs import subs
from adlm.diffusion.masking import absorbing_divergence, absorbing_posterior
from adlm.errors import UserError
from adlm.methods.inputs import attention_pad, vocabulary_of
from adlm.methods.masked_diffusion import BoundNoise, MaskedDiffusion, NoisedBatch, logits_everywhere
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame
from adlm.sampling.reference import sample_reference, shape_everywhere
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class D3pm(MaskedDiffusion):
    any_order: ClassVar[bool] = False
    constrained: ClassVar[bool] = False
    samplers: ClassVar[Sequence[str] | None] = ("ancestral",)  # the others need beliefs without mass on the mask

    def __post_init__(self) -> None:
        if self.config.time.steps == 0:
            raise UserError(
                "time.steps 0 is continuous time, and d3pm is a method of discrete steps; try time.steps=1000"
            )
        if self.schedule.mask_chance(torch.zeros(())) > 0:
            raise UserError(
                f"schedule.name {self.config.schedule.name} masks tokens at t = 0 already, and d3pm reads clean text "
                "there; try schedule=published"
            )

    def loss_at(
        self,
        network: Transformer,
        x: Tensor,
        noised: NoisedBatch,
        pad: Tensor | None = None,
        progress: float = 1.0,
        sigma: Tensor | None = None,
    ) -> Loss:
        """T times the KL divergence of one step at masked positions, plus the reconstruction of x from itself at t = 0.

        `sigma` (B,) overrides the noise level that the network is conditioned on. `progress` has no effect.
        """
        divergence, predicted = self.step_nats(network, x, noised, pad, sigma), self.predicted(x, pad, noised.given)
        reconstruction = self._last_nats(network, x, pad, predicted)
        nats = divergence + reconstruction
        parts = {"divergence": divergence.sum().detach(), "reconstruction": reconstruction.sum().detach()}
        return Loss(nats.sum(), nats.detach(), predicted.sum(), parts)

    def bound_at(self, network: Transformer, x: Tensor, noise: BoundNoise, pad: Tensor | None) -> Tensor:
        predicted = self.predicted(x, pad, noise.noised.given)
        return super().bound_at(network, x, noise, pad) + self._last_nats(network, x, pad, predicted)

    def step_nats(
        self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None, sigma: Tensor | None = None
    ) -> Tensor:
        config, mask_id = self.config, vocabulary_of(self.config).mask_id
        schedule, masked = self.schedule, self.masked_positions(noised.z, pad)
        assert noised.s is not None

        def at_masked(alpha: Tensor) -> Tensor:
            return alpha.to(x.device)[:, None].expand_as(x)[masked]

        alpha_s, alpha_t = at_masked(schedule.alpha(noised.s)), at_masked(schedule.alpha(noised.t))
        targets = x[masked]

        def divergence_at(logits: Tensor, index: Tensor) -> Tensor:
            log_beliefs = logits.log_softmax(dim=-1)
            log_right = log_beliefs.gather(-1, targets[index, None])[:, 0]
            divergence = absorbing_divergence(log_right, log_beliefs[:, mask_id], alpha_s[index], alpha_t[index])
            return (config.time.steps * divergence).to(logits.dtype)

        if sigma is None:
            sigma = self.conditioning(noised, pad)[0]
        return network.nats_at_positions(noised.z, masked, divergence_at, sigma, attention_pad(config, pad))

    def _last_nats(self, network: Transformer, x: Tensor, pad: Tensor | None, predicted: Tensor) -> Tensor:
        """-log x_theta(x) of the predicted tokens at t = 0, where the network reads x itself, (B, L)."""
        targets, start = x[predicted], torch.zeros(len(x), dtype=torch.float64)

        def cross_entropy_at(logits: Tensor, index: Tensor) -> Tensor:
            return -logits.log_softmax(dim=-1).gather(-1, targets[index, None])[:, 0]

        return network.nats_at_positions(x, predicted, cross_entropy_at, *self.conditioning(NoisedBatch(x, start), pad))

    def log_beliefs(self, network: Transformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Over all V symbols: the mask may have mass, and a visible token is not copied."""
        return self.logits(network, z, alpha).log_softmax(dim=-1)

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        run = self.sampling_run(network, canvas, sampling, rng, pad)
        steps, mask_id, logits = run.steps, run.mask_id, logits_everywhere(network, self.conditioning_sigma, pad)

        def one_step(z: Tensor, step: int) -> Tensor:
            alpha_s, alpha_t = steps.alpha_s[step], steps.alpha_t[step]
            log_beliefs = logits(z, alpha_t.expand(len(z))).double().log_softmax(dim=-1)
            return absorbing_posterior(z, shape_everywhere(log_beliefs, z, sampling, pad), alpha_s, alpha_t, mask_id)

        return sample_reference(run, one_step, lambda z, alpha: subs(logits(z, alpha), z, mask_id))
