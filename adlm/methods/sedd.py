"""SEDD: one network told the noise learns scores of the absorbing process, trained with their entropy.

The entropy of scores made of beliefs is the NELBO's weight times the cross-entropy, so the nats here and MDLM's are the
same kind of number; what SEDD leaves free is the scores' sum.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import subs
from adlm.diffusion.scores import log_scores, score_entropy, score_step
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
from adlm.sampling.reference import sample_reference
from adlm.sampling.rng import RowRng
from adlm.sampling.steps import steps_of


@dataclass(frozen=True)
class Sedd:
    config: Config
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.config.time.steps:
            raise UserError(
                f"time.steps {self.config.time.steps} is discrete time, and sedd is a method of continuous time; "
                "use time.steps=0"
            )
        if diffusion.schedule_of(self.config).alpha(torch.ones((), dtype=torch.float64)) <= 0:
            raise UserError(
                f"schedule.eps {self.config.schedule.eps} makes the noise at t = 1 infinite, and sedd is trained on "
                "noise; try schedule=published"
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

    def loss_at(self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None) -> Loss:
        """sigma'_t times the score entropy of what is masked, at a given noising."""
        nats = self._nats(network, x, noised, pad)
        parts = {"score_entropy": nats.sum().detach()}
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
            return self._nats(network, x, noised, pad)

        def last(noised: NoisedBatch) -> Tensor:
            masked = diffusion.masked_positions(self.config, noised.z, pad).float()
            told = diffusion.conditioning_sigma(self.config, noised.t, x.device)
            mask_id = vocabulary_of(self.config).mask_id
            return network.score(noised.z, x, masked, mask_id, told, attention_pad(self.config, pad)).nats

        with eval_mode(network):
            return diffusion.bound(self.config, nats_at, x, pad, generator, last, portion)

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
        """Scores normalised over clean tokens are the SUBS beliefs of the logits; `analytic` takes their sum too."""
        check_canvas(self.config, canvas, sampling, pad)
        if sampling.sampler != "analytic":
            return denoising.generate(self.config, network, canvas, sampling, draws, pad)
        knobs = ("temperature", "top_k", "top_p", "repetition_penalty")
        for knob in knobs:
            if getattr(sampling, knob) != getattr(Sampling(), knob):
                raise UserError(
                    f"sampling.{knob} {getattr(sampling, knob)} sharpens beliefs, and analytic draws by scores as they "
                    "are; use ancestral"
                )
        config, mask_id = self.config, vocabulary_of(self.config).mask_id
        steps = steps_of(diffusion.schedule_of(config), sampling)
        logits = denoising.logits_everywhere(config, network, pad)
        drawn_last = replace(sampling, final="draw")

        def beliefs(z: Tensor, alpha: Tensor) -> Tensor:
            return subs(logits(z, alpha), z, mask_id)

        def one_step(z: Tensor, step: int) -> Tensor:
            sigma_t, sigma_s = -steps.alpha_t[step].log(), -steps.alpha_s[step].log()
            scores = log_scores(logits(z, steps.alpha_t[step].expand(len(z))).double(), z, sigma_t.to(z.device))
            return score_step(z, scores, sigma_s.to(z.device), sigma_t.to(z.device), mask_id)

        return sample_reference(one_step, beliefs, canvas, mask_id, steps, drawn_last, draws, pad)

    def _nats(self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        schedule, mask_id = diffusion.schedule_of(self.config), vocabulary_of(self.config).mask_id
        masked = diffusion.masked_positions(self.config, noised.z, pad)
        sigma = schedules.sigma(schedule, noised.t).float().to(x.device)[:, None].expand_as(x)[masked]
        rate = schedules.sigma_prime(schedule, noised.t).float().to(x.device)[:, None]
        right = x[masked]

        def price(logits: Tensor, index: Tensor) -> Tensor:
            scores = log_scores(logits, torch.full_like(index, mask_id), sigma[index])
            clean = scores.index_fill(-1, torch.tensor(mask_id, device=x.device), -torch.inf)
            log_right = scores.gather(-1, right[index, None])[:, 0]
            return score_entropy(torch.logsumexp(clean, dim=-1), log_right, sigma[index])

        told = diffusion.conditioning_sigma(self.config, noised.t, x.device)
        return rate * network.nats_at_positions(noised.z, masked, price, told, attention_pad(self.config, pad))
