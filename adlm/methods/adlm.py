"""ADLM: an anchor network predicts the important tokens, a denoiser restores the rest from it, trained with the ANELBO.

[ADLM Eq. 7]: the NELBO of the composed network + gamma * the same weight * the anchor network's cross-entropy at
anchors. With gamma 0 and no second network this is MDLM, to the last bit. With `time.weight` one, the weight of both
terms in training is 1.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.data.rows.anchor_rules import AnchorRule, GetStatistics, anchor_rule, no_statistics
from adlm.diffusion.objectives import anchor_gamma, anchor_weight
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import AnchorStates, FrozenNetwork, repeat_first
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import FrozenOutput, MaskedDiffusion, NetworkOutput, NoisedBatch
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.sampling.events import padded_num_rows
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame, NoisyRows, SamplingRun


@dataclass(frozen=True)
class Anchored:
    """Mixed into a method with an anchor network: the anchor rule and the weight of the anchor term."""

    config: Config
    statistics: GetStatistics = no_statistics
    """Of the training text, for the rules that need it; set by training."""
    anchored: ClassVar[bool] = True

    @cached_property
    def anchor_rule(self) -> AnchorRule:
        return anchor_rule(self.config.anchor, vocabulary_of(self.config).size, self.statistics)

    @property
    def reads_labels(self) -> bool:
        """Whether the anchors are labels of the text, which batches then carry."""
        return self.config.anchor.rule == "syntax" and self.config.anchor.gamma > 0

    def with_statistics(self, statistics: GetStatistics) -> Self:
        """The same method for training on a text. Rules that need statistics take them now."""
        method = replace(self, statistics=statistics)
        if self.config.anchor.gamma > 0 and not self.reads_labels:
            method.anchors(torch.zeros(1, 1, dtype=torch.int64), None)
        return method

    def anchors(self, x: Tensor, pad: Tensor | None, labels: Tensor | None = None) -> Tensor:
        """(B, L), True at the anchors of clean ids: by the rule, or the `labels` (B, L) that the text has for it."""
        return self.anchor_rule(x, pad) if labels is None else labels

    def gamma_at(self, progress: float) -> float | None:
        """The weight of the anchor term after a fraction of training; None where the loss has no such term."""
        anchor = self.config.anchor
        return anchor_gamma(anchor.gamma, progress, anchor.warm_up, anchor.until)


@dataclass(frozen=True)
class Adlm(Anchored, MaskedDiffusion):
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        time, sampling, every = self.config.time, self.config.sampling, self.config.sampling.anchor_every
        if every > 1 and (time.steps != sampling.steps or time.sigma):
            raise UserError(
                f"sampling.anchor_every {every} needs the bound on the sampler's grid, without remasking: time.steps "
                f"{time.steps} must be sampling.steps {sampling.steps}, and time.sigma 0"
            )
        if every > 1 and self.schedule.mask_chance(torch.zeros((), dtype=torch.float64)) > 0:
            raise UserError(
                f"sampling.anchor_every {every} needs a schedule without masks at t = 0, and schedule.name "
                f"{self.config.schedule.name} leaves some; use log-linear"
            )

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size)

    def noise(
        self, x: Tensor, pad: Tensor | None, rng: BatchRng, t_min: float, given: Tensor | None = None
    ) -> NoisedBatch:
        """With `sampling.anchor_every` k, the anchor network has read the ids of the last step divisible by k.

        Given x and z_t these are z_t with more masks: a token visible at t was masked at the earlier step t' of the
        sampler with probability 1 - alpha_t' / alpha_t.
        """
        noised, every = super().noise(x, pad, rng, t_min, given), self.config.sampling.anchor_every
        if every == 1:
            return noised
        num, alpha = self.config.time.steps, self.schedule.alpha
        step = torch.round((1 - noised.t) * num)
        refreshed = 1 - (step - step % every) / num
        chance = torch.where(refreshed > noised.t, 1 - alpha(refreshed) / alpha(noised.t), 0.0)
        return replace(noised, stale=self._masked(noised.z, pad, given, chance, rng))

    def loss_at(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        noised: NoisedBatch,
        pad: Tensor | None = None,
        progress: float = 1.0,
    ) -> Loss:
        """The ANELBO. The reported perplexity is that of `nats`, which leaves the anchor term out."""
        anchor = self.config.anchor
        training, bound = self.training_and_bound_weight(noised)
        masked = self.masked_positions(noised.z, pad)
        anchor_weights, gamma = None, self.gamma_at(progress)
        if gamma is not None:
            anchors = self.anchors(x, pad, noised.labels)
            anchors = anchors if noised.given is None else anchors & ~noised.given
            anchor_weights = anchor_weight(training, anchors, masked, anchor.positions)
        options = self.loss_options(x, noised, pad)
        scored, anchor_scored = network.score(
            noised.z, x, training * masked, anchor_weights, self.mask_id, *self.conditioning(noised, pad), options
        )
        loss = self.loss_of(scored, bound * masked, x, noised, pad)
        if gamma is None or anchor_scored is None:
            return loss
        parts = loss.parts | {"anchor": anchor_scored.total.detach(), "anchor_share": anchors.sum()}
        return replace(loss, total=loss.total + gamma * anchor_scored.total, parts=parts)

    def run_sampler(self, network: Any, run: SamplingRun) -> Iterator[Frame]:
        every = run.sampling.anchor_every
        if every == 1:
            return super().run_sampler(network, run)
        denoiser_of = frozen_stale_denoiser if isinstance(network, FrozenNetwork) else stale_denoiser
        frames = super().run_sampler(network, replace(run, denoiser=denoiser_of(network, self.mask_id, every)))
        return (frame for frame in frames)  # no `PositionsFirst`: the denoiser is that of these rows, no other may join


class Refreshes:
    """When the anchor network runs: at the first call that a row makes in every `every` steps."""

    def __init__(self, every: int):
        self.every, self._num_calls = every, 0
        self._period = torch.empty(0, dtype=torch.int64)

    def due(self, num_rows: int, step: Tensor | None) -> Tensor:
        """(B,), True at rows whose anchors are to be renewed in this call; later calls have the same rows or fewer."""
        reached = torch.full((num_rows,), self._num_calls) if step is None else step
        period = torch.div(reached, self.every, rounding_mode="floor")
        due = period != self._period[:num_rows] if self._num_calls else torch.ones(num_rows, dtype=torch.bool)
        self._period, self._num_calls = period, self._num_calls + 1
        return due


def stale_denoiser(network: Any, mask_id: int, every: int) -> Denoiser:
    """The denoiser of rows, or of one block, whose anchor network runs every `every` steps: the plain form."""
    refreshes, read = Refreshes(every), torch.empty(0)

    def denoise(noisy: NoisyRows) -> DenoiserOutput:
        nonlocal read
        z = noisy.z
        due = refreshes.due(len(z), noisy.step).to(z.device)
        read = z.clone() if due.all() else torch.where(due[:, None], z, read[: len(z)])
        return NetworkOutput(network, z, None, noisy.pad, mask_id, {"stale": read})

    return denoise


def frozen_stale_denoiser(network: FrozenNetwork, mask_id: int, every: int) -> Denoiser:
    """`stale_denoiser` of whole rows by a frozen network: the anchor network reads the rows that are due, no others."""
    refreshes = Refreshes(every)
    anchors: AnchorStates | None = None

    def denoise(noisy: NoisyRows) -> DenoiserOutput:
        nonlocal anchors
        z, pad = noisy.z, noisy.pad
        due = refreshes.due(len(z), noisy.step)
        if anchors is None or due.all():
            anchors = network.read_anchors(z, pad)
        else:
            anchors = anchors.rows(len(z))
            if due.any():
                where, num = due.nonzero()[:, 0], int(due.sum())
                num_read = max(padded_num_rows(num, len(z)), -(-len(z) // 4))  # few shapes: each is captured
                read = repeat_first(where, num_read).to(z.device)
                new = network.read_anchors(z[read], None if pad is None else pad[read])
                anchors.renew(read[:num], new.rows(num))
        return FrozenOutput(network, network.denoise(z, anchors, pad), mask_id)

    return denoise
