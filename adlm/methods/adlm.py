"""ADLM: an anchor network predicts the important tokens, a denoiser restores the rest from it, trained with the ANELBO.

[ADLM Eq. 7]: the NELBO of the composed network + gamma * the same weight * the anchor network's cross-entropy at
anchors. With gamma 0 and no second network this is MDLM, to the last bit. With `time.weight` one, the weight of both
terms in training is 1.

Shapes: B sequences, L tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.data.rows.anchor_rules import AnchorRule, GetStatistics, anchor_rule, no_statistics
from adlm.diffusion.objectives import anchor_gamma, anchor_weight
from adlm.diffusion.times import BatchRng
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import MaskedDiffusion, NoisedBatch
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import Scored


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

    def with_statistics(self, statistics: GetStatistics) -> Self:
        """The same method for training on a text. Rules that need statistics take them now."""
        method = replace(self, statistics=statistics)
        if self.config.anchor.gamma > 0:
            method.anchors(torch.zeros(1, 1, dtype=torch.int64), None)
        return method

    def anchors(self, x: Tensor, pad: Tensor | None) -> Tensor:
        """(B, L), True at the anchors of clean ids."""
        return self.anchor_rule(x, pad)

    def gamma_at(self, progress: float) -> float | None:
        """The weight of the anchor term after a fraction of training; None where the loss has no such term."""
        anchor = self.config.anchor
        return anchor_gamma(anchor.gamma, progress, anchor.warm_up, anchor.until)


@dataclass(frozen=True)
class Adlm(Anchored, MaskedDiffusion):
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

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

    def score_options(self, noised: NoisedBatch) -> dict[str, Any]:
        return super().score_options(noised) | ({} if noised.stale is None else {"stale": noised.stale})

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
            anchors = self.anchors(x, pad) if noised.given is None else self.anchors(x, pad) & ~noised.given
            anchor_weights = anchor_weight(training, anchors, masked, anchor.positions)
        options = self.score_options(noised) | self.loss_options(x, noised, pad)
        scored, anchor_scored = network.score(
            noised.z, x, training * masked, anchor_weights, self.mask_id, *self.conditioning(noised, pad), **options
        )
        loss = self.loss_of(scored, bound * masked, x, noised, pad)
        if gamma is None or anchor_scored is None:
            return loss
        parts = loss.parts | {"anchor": anchor_scored.total.detach(), "anchor_share": anchors.sum()}
        return replace(loss, total=loss.total + gamma * anchor_scored.total, parts=parts)

    def score(self, network: AnchoredTransformer, z: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Scored:
        """The denoiser's cross-entropy of x given z."""
        return network.score(z, x, weight, None, self.mask_id, **options)[0]
