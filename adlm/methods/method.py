"""The interface of a method and the loss it returns. Does not depend on any method.

Inputs are trusted here: ids, canvas and options are checked where they enter (`methods/inputs.py`).

The network is typed Any: each method takes the network that its own `build` makes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.times import BatchRng
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng


@dataclass(frozen=True)
class Loss:
    """The objective of one batch as sums: whoever adds up micro-batches or ranks divides once, by `num_tokens`."""

    total: Tensor
    """The training objective summed over tokens, in nats; carries the gradient."""
    nats: Tensor
    """(B, L), the estimate of the bound per token: weight * -log p, without the anchor term; 0 at padding; no gradient.

    Unlike `Scored.nats`, which is not weighted.
    """
    num_tokens: Tensor
    """The number of `predicted` tokens, masked or not."""
    parts: dict[str, Tensor]
    """The terms of `total` by name, summed over tokens; no gradient."""

    @property
    def mean(self) -> Tensor:
        """`total` per token."""
        return self.total / self.num_tokens


@dataclass(frozen=True)
class Method:
    """How a network is built, trained, evaluated and sampled from. Constructed from a validated Config."""

    config: Config

    exact: ClassVar[bool] = False
    """Whether `bound` is -log p(x) itself, computed without random numbers."""
    causal: ClassVar[bool] = False
    """Whether the network predicts each token from those before it."""
    cached: ClassVar[bool] = False
    """Whether it samples with a KV cache, from a prompt to the end: text before the open block never changes."""
    anchored: ClassVar[bool] = False
    """Whether the network has an anchor network."""
    any_order: ClassVar[bool] = True
    """Whether the bound is a weighted cross-entropy of beliefs at masks, which any-order estimation needs."""
    samplers: ClassVar[Sequence[str] | None] = None
    """The names of the samplers that work with it; None if all do."""
    auto_class: ClassVar[str | None] = None
    """The auto class of `transformers` that loads its exported models; None if they cannot be exported."""
    constrained: ClassVar[bool] = True
    """Whether `generate` fills `holes` as their constraints demand; otherwise it is given none."""

    def build(self) -> nn.Module:
        """A newly initialised network; its weights come from torch's default generator."""
        raise NotImplementedError

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), True at the tokens whose nats count: all of the text, or all but the first for causal methods.

        Tokens where `given` (B, L) is True, such as prompts, are never masked and never predicted.
        """
        raise NotImplementedError

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
    ) -> Loss:
        """The training objective on clean ids x (B, L), after a share `progress` of training."""
        raise NotImplementedError

    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """nats (B, L), 0 where not `predicted`: an unbiased estimate of an upper bound on -log p(x).

        With `given` tokens it is one on -log p of the others, conditional on these; for methods that write from left
        to right, each token is conditional on those before it.
        """
        raise NotImplementedError

    def log_beliefs(self, network: Any, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        """(B, L, V), in the clean token at each position given noisy ids z; for causal methods, in the token after it.

        `alpha` (B,), the share of visible tokens, matters only to time-conditioned networks; without it the share of
        masks in each row is taken for t.
        """
        raise NotImplementedError

    def conditioning_sigma(self, z: Tensor, alpha: Tensor | None, pad: Tensor | None = None) -> Tensor | None:
        """(B,) for time-conditioned networks, else None: -log alpha if given, else sigma at t = the share of masks."""
        raise NotImplementedError

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        """A user error if the method cannot fill in a valid canvas with these options. Called before `generate`."""
        raise NotImplementedError

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """From the canvas (B, L), mask ids where text is wanted, to text, frame by frame. Each row has its own RNG.

        The network is the trained one or, faster, its FrozenNetwork. `pad` is True after the end of shorter rows.
        `holes` are those of the canvas whose text is constrained.
        """
        raise NotImplementedError
