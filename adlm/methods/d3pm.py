"""D3PM with the absorbing process: T discrete steps, a network told the noise that may still believe in the mask.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.absorbing import absorbing_divergence, absorbing_posterior
from adlm.diffusion.beliefs import subs
from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import denoising
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.inputs import attention_pad, check_canvas, eval_mode, not_pad, vocabulary_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame
from adlm.sampling.reference import sample_reference, shape_everywhere
from adlm.sampling.rng import RowRng
from adlm.sampling.steps import steps_of


@dataclass(frozen=True)
class D3pm:
    config: Config
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.config.time.steps == 0:
            raise UserError(
                "time.steps 0 is continuous time, and d3pm is a method of discrete steps; try time.steps=1000"
            )
        if diffusion.schedule_of(self.config).mask_chance(torch.zeros(())) > 0:
            raise UserError(
                f"schedule.name {self.config.schedule.name} hides tokens at t = 0 already, and d3pm reads clean text "
                "there; try schedule=published"
            )

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

    def loss_at(
        self,
        network: Transformer,
        x: Tensor,
        noised: NoisedBatch,
        pad: Tensor | None = None,
        told: Tensor | None = None,
    ) -> Loss:
        """T times the divergence of one step at what is masked, plus naming every token of x itself at t = 0.

        `told` (B,) is the noise the network is told, where it is not the schedule's.
        """
        step, last = self._step(network, x, noised, pad, told), self._last(network, x, pad)
        nats = step + last
        parts = {"divergence": step.sum().detach(), "reconstruction": last.sum().detach()}
        return Loss(nats.sum(), nats.detach(), self.predicted(x, pad).sum(), parts)

    @torch.no_grad()
    def bound(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Tensor:
        def nats_at(noised: NoisedBatch) -> Tensor:
            return self._step(network, x, noised, pad)

        with eval_mode(network):
            nats = diffusion.bound(self.config, nats_at, x, pad, generator, portion=portion)
            return nats + self._last(network, x, pad)

    def log_beliefs(self, network: Transformer, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Over all V symbols: the mask may have mass, and a visible token is not copied."""
        return diffusion.logits_at(self.config, network, z, alpha).log_softmax(dim=-1)

    def generate(
        self,
        network: Transformer | FrozenNetwork,
        canvas: Tensor,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        config, mask_id = self.config, vocabulary_of(self.config).mask_id
        check_canvas(config, canvas, sampling, pad)
        if sampling.sampler != "ancestral":
            raise UserError(
                f"sampling.sampler {sampling.sampler} needs beliefs without mass on the mask, and d3pm's may have "
                "some; use ancestral"
            )
        steps = steps_of(diffusion.schedule_of(config), sampling)
        logits = denoising.logits_everywhere(config, network, pad)

        def beliefs(z: Tensor, alpha: Tensor) -> Tensor:
            return subs(logits(z, alpha), z, mask_id)

        def one_step(z: Tensor, step: int) -> Tensor:
            alpha_s, alpha_t = steps.alpha_s[step], steps.alpha_t[step]
            log_beliefs = logits(z, alpha_t.expand(len(z))).double().log_softmax(dim=-1)
            return absorbing_posterior(z, shape_everywhere(log_beliefs, z, sampling, pad), alpha_s, alpha_t, mask_id)

        return sample_reference(one_step, beliefs, canvas, mask_id, steps, sampling, draws, pad)

    def _step(
        self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None, told: Tensor | None = None
    ) -> Tensor:
        config, mask_id = self.config, vocabulary_of(self.config).mask_id
        schedule, masked = diffusion.schedule_of(config), diffusion.masked_positions(config, noised.z, pad)
        assert noised.s is not None

        def at_masked(alpha: Tensor) -> Tensor:
            return alpha.to(x.device)[:, None].expand_as(x)[masked]

        alpha_s, alpha_t = at_masked(schedule.alpha(noised.s)), at_masked(schedule.alpha(noised.t))
        right = x[masked]

        def price(logits: Tensor, index: Tensor) -> Tensor:
            log_beliefs = logits.log_softmax(dim=-1)
            log_right = log_beliefs.gather(-1, right[index, None])[:, 0]
            divergence = absorbing_divergence(log_right, log_beliefs[:, mask_id], alpha_s[index], alpha_t[index])
            return (config.time.steps * divergence).to(logits.dtype)

        if told is None:
            told = diffusion.conditioning_sigma(config, noised.t, x.device)
        return network.nats_at_positions(noised.z, masked, price, told, attention_pad(config, pad))

    def _last(self, network: Transformer, x: Tensor, pad: Tensor | None) -> Tensor:
        right, start = x[not_pad(x, pad)], torch.zeros(len(x), dtype=torch.float64)

        def price(logits: Tensor, index: Tensor) -> Tensor:
            return -logits.log_softmax(dim=-1).gather(-1, right[index, None])[:, 0]

        told = diffusion.conditioning_sigma(self.config, start, x.device)
        return network.nats_at_positions(x, not_pad(x, pad), price, told, attention_pad(self.config, pad))
