"""AR: one causal network predicts each token from those before it. `Causal` is what AR and A2R share.

Their nats are exact, not a bound. They sample from left to right.

The first token of a row is given (packed rows begin with bos), so L tokens are L - 1 predictions.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates, KVCache
from adlm.methods.inputs import (
    check_left_to_right,
    check_sampler,
    eval_mode,
    given_option,
    not_pad,
    stop_id,
    vocabulary_of,
    with_first_token,
)
from adlm.methods.method import Loss, Method
from adlm.models.transformer import Transformer
from adlm.sampling.constrained import NextTokens
from adlm.sampling.frame import Ending, Frame, Row
from adlm.sampling.left_to_right import (
    NextTokenModel,
    NextTokenSampler,
    draw_next,
    needs_history,
    sample_left_to_right,
    sampler_from_model,
)
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sample_long
from adlm.sampling.shaping import DrawnTokens


@dataclass(frozen=True)
class Causal(Method):
    """A network that predicts each token from those before it. Subclasses define `build` and `loss`.

    Networks are typed Any: each subclass takes the network that its own `build` makes.
    """

    exact: ClassVar[bool] = True
    causal: ClassVar[bool] = True
    cached: ClassVar[bool] = True
    any_order: ClassVar[bool] = False
    samplers: ClassVar[Sequence[str] | None] = ("ancestral", "left-to-right")

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), True at every token of the text except the first and `given` ones; padding comes after the text."""
        if pad is not None and (pad[:, :-1] & ~pad[:, 1:]).any():
            raise UserError("pad stands before text, and a causal network would read the padding; pad on the right")
        counted = not_pad(x, pad).clone()
        counted[:, 0] = False
        return counted if given is None else counted & ~given

    @torch.no_grad()
    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        with eval_mode(network):
            return self.loss(network, x, pad, 1.0, rng, **given_option(given)).nats

    @torch.no_grad()
    def log_beliefs(self, network: Any, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        """(B, L, V), in the token after each position; the mask has no mass."""
        mask_id = vocabulary_of(self.config).mask_id
        with eval_mode(network):
            return clean_log_beliefs(network(z), mask_id)

    def conditioning_sigma(self, z: Tensor, alpha: Tensor | None, pad: Tensor | None = None) -> Tensor | None:
        return None

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        """The canvas must be a prompt followed by masks, and there must be a bos where it begins with a mask."""
        check_sampler(self, sampling)
        check_left_to_right(self.config, canvas, sampling, pad)

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """One token at a time. The canvas is a prompt followed by masks; a masked first token becomes bos.

        In a hole, and with `no_repeat`, each token is drawn from the model's beliefs given that.
        """
        vocabulary, canvas = vocabulary_of(self.config), with_first_token(self.config, canvas)
        mask_id, eos_id = vocabulary.mask_id, stop_id(self.config, sampling)

        def write(
            canvas: Tensor, ending: Ending | None, pad: Tensor | None, holes: Sequence[ConstrainedHole] = ()
        ) -> Iterator[Frame]:
            constrain = NextTokens(holes, sampling.no_repeat, mask_id, pad) if holes or sampling.no_repeat else None
            with self._next_token_sampler(network, sampling, len(canvas), canvas.shape[1], constrain) as next_token:
                yield from sample_left_to_right(next_token, canvas, mask_id, rng, pad, ending)

        ending = None if eos_id is None else Ending(eos_id, canvas == mask_id)
        row = Row(self.config.length, tuple(vocabulary.row_boundaries[0]))
        return sample_long(write, mask_id, row, canvas, ending, pad, holes)

    @contextmanager
    def _next_token_sampler(
        self,
        network: nn.Module | FrozenNetwork,
        sampling: Sampling,
        num_rows: int,
        length: int,
        constrain: NextTokens | None,
    ) -> Iterator[NextTokenSampler]:
        """A frozen network uses a KV cache; a network in training reads the full prefix for every token."""
        if isinstance(network, FrozenNetwork):
            mask_id = vocabulary_of(self.config).mask_id
            with network.lend_cache(num_rows, length) as cache:
                if constrain is None:
                    yield _cached_sampler(network, mask_id, cache, sampling)
                else:
                    yield sampler_from_model(_cached_model(network, mask_id, cache), sampling, constrain)
            return
        prefix: list[Tensor] = []

        def read_prefix(ids: Tensor) -> Tensor:
            prefix.append(ids)
            return self.log_beliefs(network, torch.cat(prefix, dim=1))[:, -1]

        yield sampler_from_model(read_prefix, sampling, constrain)


def _cached_sampler(network: FrozenNetwork, mask_id: int, cache: KVCache, sampling: Sampling) -> NextTokenSampler:
    """Reading and drawing are one call of the network, so that a CUDA graph can hold both."""
    passes_history, key = needs_history(sampling), ("next token", sampling)

    def draw_after(hidden: HiddenStates, uniforms: Tensor, z: Tensor | None) -> DrawnTokens:
        return draw_next(network.log_beliefs(hidden.last[:, -1], mask_id), z, uniforms, sampling)

    def next_token(ids: Tensor, z: Tensor, uniforms: Tensor) -> DrawnTokens:
        return network.read_and(key, draw_after, ids, cache, uniforms, z if passes_history else None)

    return next_token


def _cached_model(network: FrozenNetwork, mask_id: int, cache: KVCache) -> NextTokenModel:
    """Reading is a call of its own: what follows it looks up constraints on the host."""

    def log_beliefs(hidden: HiddenStates) -> Tensor:
        return network.log_beliefs(hidden.last[:, -1], mask_id)

    return lambda ids: network.read_and("next beliefs", log_beliefs, ids, cache)


@dataclass(frozen=True)
class Ar(Causal):
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"

    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, causal=True, modulated=False)

    def loss(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
    ) -> Loss:
        """The cross-entropy of every predicted token. Draws no random numbers."""
        predicted = self.predicted(x, pad, given)
        weight = predicted[:, 1:].float()
        scored = network.score(x[:, :-1], x[:, 1:], weight, vocabulary_of(self.config).mask_id)
        parts = {"nll": scored.total.detach()}
        return Loss(scored.total, F.pad(scored.nats, (1, 0)), predicted.sum(), parts)
