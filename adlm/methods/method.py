"""What every method can be asked. Knows none of the answers.

The network is typed Any: each method takes the network that its own `build` makes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.diffusion.times import BatchSlice
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Loss:
    """One batch's objective, summed and not yet averaged: who adds up batches or processes divides once, by tokens."""

    total: Tensor
    """Sum over tokens, in nats, of everything that is trained: what is differentiated."""
    nats: Tensor
    """(B, L), the estimate of the bound a token, without the anchor term; 0 at padding; carries no gradient."""
    num_tokens: Tensor
    """How many tokens the nats are of: those that are `predicted`, masked or not."""
    parts: dict[str, Tensor]
    """Sums over tokens of the terms of `total`, by name; no gradient."""

    @property
    def mean(self) -> Tensor:
        """`total` a token."""
        return self.total / self.num_tokens


class Method(Protocol):
    """A way to train a network on ids, to bound the likelihood of ids, and to make ids. Made from a checked Config."""

    @property
    def config(self) -> Config: ...

    @property
    def exact(self) -> bool:
        """Whether `bound` is -log p(x) itself, and nothing is drawn for it."""
        ...

    def build(self) -> nn.Module:
        """A fresh network, drawn from torch's default generator."""
        ...

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        """(B, L), True at the tokens whose nats count: all of the text or, from left to right, all but the first."""
        ...

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Loss:
        """The training objective on clean ids x (B, L), after a share `progress` of training.

        `portion` says which rows of a larger batch these are, and what is drawn is then that batch's.
        """
        ...

    def bound(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        generator: torch.Generator,
        portion: BatchSlice | None = None,
    ) -> Tensor:
        """nats (B, L), 0 where not `predicted`: an unbiased estimate of an upper bound on -log p(x)."""
        ...

    def log_beliefs(self, network: Any, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        """(B, L, V): of the clean token at each place given noisy ids z; left to right, of the token after it.

        `alpha` (B,), the share of visible tokens, matters only to a network that is told the noise; without it the
        share of masks in each row stands for the time.
        """
        ...

    def generate(
        self, network: Any, canvas: Tensor, sampling: Sampling, draws: RowRng, pad: Tensor | None = None
    ) -> Iterator[Frame]:
        """A walk from the canvas (B, L), mask ids where text is wanted, to text. Every row draws its own numbers.

        The network is the one that is trained or, faster, its `Frozen` form. `pad` ends rows that are shorter.
        """
        ...
