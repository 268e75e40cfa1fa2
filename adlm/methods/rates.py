"""adlm and mdlm with an order of their own: the network also predicts which masked token is revealed next.

The text is revealed token by token. At every step the next one is drawn among the masked tokens, each with the share
of its rate in the sum of their rates, and then its symbol from the beliefs. The order is a latent variable: training
draws it in the same way from rates of the clean text, and the bound compares the two. docs/theory.md has the
mathematics. With equal rates everywhere it is the bound of masked diffusion.

Other samplers and estimators see a masked model like any other.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.data.rows.anchor_rules import GetStatistics, anchor_rule
from adlm.diffusion.masking import draw_order, mask_first
from adlm.diffusion.objectives import log_order_chance, log_reveal_chances
from adlm.diffusion.times import BatchRng, draw_times, importance_weight
from adlm.errors import UserError
from adlm.methods.adlm import Adlm
from adlm.methods.inputs import attention_pad, eval_mode, vocabulary_of
from adlm.methods.masked_diffusion import DrawnOrder, MaskedDiffusion, NoisedBatch, per_token
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import Scored
from adlm.models.rates import RevealRates, TextRates
from adlm.models.transformer import Transformer

RULES_OF_SYMBOLS = ("rare", "frequent", "pattern", "content")
"""Anchor rules that look at each token alone: a table of symbols can hold them."""


@dataclass(frozen=True)
class Rated(MaskedDiffusion):
    auto_class: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        rates, anchor, time = self.config.rates, self.config.anchor, self.config.time
        if time.masks != "counted":
            raise UserError(
                f"rates.rule {rates.rule} reveals one token after the other, and time.masks {time.masks} draws masks "
                "independently; use time.masks=counted",
                "time.masks",
            )
        if time.weight != "bound":
            raise UserError(
                f"rates.rule {rates.rule} is trained with the bound, and time.weight is {time.weight}; use bound",
                "time.weight",
            )
        if self.config.model.time_conditioning:
            raise UserError(
                f"rates.rule {rates.rule} has steps and no times, and model.time_conditioning is true; use false",
                "model.time_conditioning",
            )
        if rates.rule == "anchors" and anchor.rule not in RULES_OF_SYMBOLS:
            raise UserError(
                f"rates.rule anchors needs an anchor.rule that looks at each token alone, and {anchor.rule} does not; "
                f"use {', '.join(RULES_OF_SYMBOLS[:-1])} or {RULES_OF_SYMBOLS[-1]}",
                "anchor.rule",
            )

    def reveal_rates(self) -> RevealRates:
        return RevealRates(self.config.model, self.config.rates, vocabulary_of(self.config).size)

    def anchor_table(self, statistics: GetStatistics) -> Tensor:
        """(V,), True at the symbols that are anchors."""
        num_symbols = vocabulary_of(self.config).size
        return anchor_rule(self.config.anchor, num_symbols, statistics)(torch.arange(num_symbols)[None], None)[0]

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Loss:
        time = self.config.time
        share = draw_times(len(x), rng, 0.0, time.antithetic, time.power)
        noised = self.noised_by_rates(network, x, pad, share, rng, given)
        importance = importance_weight(share, 0.0, time.power)
        return self.loss_at(network, x, replace(noised, importance=importance, labels=labels), pad, progress)

    def noised_by_rates(
        self, network: Any, x: Tensor, pad: Tensor | None, share: Tensor, rng: BatchRng, given: Tensor | None
    ) -> NoisedBatch:
        """The texts after all but a share (B,) of their tokens are revealed, in an order drawn by their rates."""
        rates: TextRates = network.text_rates(x, pad)
        maskable, order = self.predicted(x, pad, given), draw_order(rates.log_rates.detach(), rng)
        z, t = mask_first(x, maskable, share, order, self.mask_id)
        drawn = DrawnOrder(rates.log_rates, None, None)
        is_whole = self.config.rates.gradient == "whole" and torch.is_grad_enabled()
        if rates.level is not None and rates.slope is not None and is_whole:
            log_chance = log_order_chance(rates.log_rates, order, maskable, z == self.mask_id)
            costs = (rates.level + rates.slope * per_token(t.to(rates.slope))) * maskable
            drawn = DrawnOrder(rates.log_rates, log_chance, costs.sum(dim=1) / maskable.sum(dim=1).clamp(min=1))
        return NoisedBatch(z, t, given=given, order=drawn)

    def weight(self, noised: NoisedBatch) -> Tensor:
        """(B, L): of a masked token, the number of tokens times the probability that it is revealed next."""
        weight = super().weight(noised)
        if noised.order is None:
            return weight
        masked = noised.z == self.mask_id
        chances = log_reveal_chances(noised.order.log_rates.detach(), masked).exp()
        return weight * torch.where(masked, chances * masked.sum(dim=1, keepdim=True), 1.0)

    def loss_of(self, scored: Scored, weight: Tensor, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Loss:
        """The bound. The gradient of learnt rates has two parts: that of the next step, and that of the order so far.

        The second is the gradient of the order's log probability times what the text costs [REINFORCE]. From the cost
        `expected` is subtracted, a baseline that is trained to predict it: this lowers the noise and adds no bias.
        """
        loss, order_drawn = super().loss_of(scored, weight, x, noised, pad), noised.order
        if order_drawn is None or scored.log_rates is None:
            return loss
        masked = noised.z == self.mask_id
        drawn = log_reveal_chances(order_drawn.log_rates, masked)
        order = drawn - log_reveal_chances(scored.log_rates, masked)
        # the weight has q_l as a constant; the ratio is 1, and its gradient is that of log q_l
        ratio = (drawn - drawn.detach()).exp()
        total = (weight * ratio * (scored.nats + order)).sum() - (weight * scored.nats).sum()
        nats = (weight * order).detach()
        loss = Loss(loss.total + total, loss.nats + nats, loss.num_tokens, loss.parts | {"order": nats.sum()})
        if order_drawn.log_chance is None or order_drawn.expected is None:
            return loss
        num_tokens = self.predicted(x, pad, noised.given).sum(dim=1).clamp(min=1)
        surprise = loss.nats.sum(dim=1) / num_tokens - order_drawn.expected
        more = num_tokens * (surprise.detach() * order_drawn.log_chance + surprise**2)
        return replace(loss, total=loss.total + (more - more.detach()).sum())  # the loss stays the bound

    @torch.no_grad()
    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """nats (B, L) whose expectation is the bound of the sampler `rates` with one token a step."""
        with eval_mode(network):
            noised = self.noised_by_rates(network, x, pad, draw_times(len(x), rng), rng, given)
            weight = self.weight(noised) * self.masked_positions(noised.z, pad)
            scored = self.score(network, noised.z, x, weight, pad=attention_pad(self.config, pad))
            return self.loss_of(scored, weight, x, noised, pad).nats


@dataclass(frozen=True)
class RatedMdlm(Rated, Mdlm):
    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, rates=self.reveal_rates())


@dataclass(frozen=True)
class RatedAdlm(Rated, Adlm):
    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size, rates=self.reveal_rates())


def rated(config: Config) -> type[Rated]:
    """The form of the method that a config names whose network predicts rates."""
    forms: dict[str, type[Rated]] = {"mdlm": RatedMdlm, "adlm": RatedAdlm}
    if config.method not in forms or config.model.block_length:
        kind = f"model.block_length {config.model.block_length}" if config.method in forms else config.method
        raise UserError(
            f"rates.rule {config.rates.rule} is for adlm and mdlm on whole rows, not for {kind}; use rates.rule=none",
            "rates.rule",
        )
    return forms[config.method]
