"""What the anchored methods share: the anchor rule and the weight of the anchor term. No networks."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.data.rows.anchor_rules import AnchorRule, GetStatistics, anchor_rule, no_statistics
from adlm.diffusion.objectives import anchor_gamma
from adlm.methods.inputs import vocabulary_of


@dataclass(frozen=True)
class Anchored:
    """Mixed into a method with an anchor network."""

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
