"""SEDD: one time-conditioned network learns the scores of the absorbing process, trained with the score entropy.

For scores derived from beliefs the score entropy is the NELBO's weight times the cross-entropy, so SEDD's nats are
comparable with MDLM's; SEDD does not constrain the sum of the scores.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import log_scores, score_entropy, score_step, subs
from adlm.errors import UserError
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import MaskedDiffusion, NoisedBatch, logits_everywhere
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame
from adlm.sampling.reference import sample_reference
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Sedd(MaskedDiffusion):
    any_order: ClassVar[bool] = False
    constrained: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.config.time.steps:
            raise UserError(
                f"time.steps {self.config.time.steps} is discrete time, and sedd is a method of continuous time; "
                "use time.steps=0"
            )
        if self.schedule.alpha(torch.ones((), dtype=torch.float64)) <= 0:
            raise UserError(
                f"schedule.eps {self.config.schedule.eps} makes the noise at t = 1 infinite, and sedd is trained on "
                "noise; try schedule=published"
            )

    def loss_at(
        self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None, progress: float = 1.0
    ) -> Loss:
        """sigma'_t times the score entropy at masked positions; the same at any `progress`."""
        nats = self.step_nats(network, x, noised, pad)
        parts = {"score_entropy": nats.sum().detach()}
        return Loss(nats.sum(), nats.detach(), self.predicted(x, pad, noised.given).sum(), parts)

    def step_nats(self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        schedule, mask_id = self.schedule, vocabulary_of(self.config).mask_id
        masked = self.masked_positions(noised.z, pad)
        sigma = schedules.sigma(schedule, noised.t).float().to(x.device)[:, None].expand_as(x)[masked]
        rate = schedules.sigma_prime(schedule, noised.t).float().to(x.device)[:, None]
        targets = x[masked]

        def entropy_at(logits: Tensor, index: Tensor) -> Tensor:
            scores = log_scores(logits, torch.full_like(index, mask_id), sigma[index])
            clean = scores.index_fill(-1, torch.tensor(mask_id, device=x.device), -torch.inf)
            log_right = scores.gather(-1, targets[index, None])[:, 0]
            return score_entropy(torch.logsumexp(clean, dim=-1), log_right, sigma[index])

        return rate * network.nats_at_positions(noised.z, masked, entropy_at, *self.conditioning(noised, pad))

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        super().check_run(canvas, sampling, pad)
        for option in ("temperature", "top_k", "top_p", "repetition_penalty") if sampling.sampler == "analytic" else ():
            if getattr(sampling, option) != getattr(Sampling(), option):
                raise UserError(
                    f"sampling.{option} {getattr(sampling, option)} changes beliefs, and analytic draws from the "
                    "unchanged scores; use ancestral",
                    f"sampling.{option}",
                )

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """Most samplers use the SUBS beliefs of the logits, the normalised scores; `analytic` uses the scores."""
        if sampling.sampler != "analytic":
            return super().generate(network, canvas, sampling, rng, pad)
        run = self.sampling_run(network, canvas, replace(sampling, final="draw"), rng, pad)
        steps, mask_id, logits = run.steps, run.mask_id, logits_everywhere(network, self.conditioning_sigma, pad)

        def one_step(z: Tensor, step: int) -> Tensor:
            sigma_t, sigma_s = -steps.alpha_t[step].log(), -steps.alpha_s[step].log()
            scores = log_scores(logits(z, steps.alpha_t[step].expand(len(z))).double(), z, sigma_t.to(z.device))
            return score_step(z, scores, sigma_s.to(z.device), sigma_t.to(z.device), mask_id)

        return sample_reference(run, one_step, lambda z, alpha: subs(logits(z, alpha), z, mask_id))
