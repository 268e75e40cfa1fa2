"""Estimators of the bound by name, and exact likelihoods. No texts, no averaging.

Shapes: B sequences, L tokens. `pad` is True at padding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from adlm.config.schema import Rates, Sampling, Schedule
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import FrozenCopy
from adlm.likelihood.settings import PerplexitySettings
from adlm.methods import method_of
from adlm.methods.block_causal import BlockCausal
from adlm.methods.inputs import eval_mode, given_option
from adlm.methods.masked_diffusion import MaskedDiffusion, per_token
from adlm.methods.method import Method
from adlm.registry import ORDERS, SAMPLERS
from adlm.sampling.rng import RowRng

PUBLISHED_EPS = 1e-3


class Estimator(Protocol):
    def __call__(
        self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None
    ) -> Tensor:
        """nats (B, L) of x (B, L), whose expectation is the bound; see `Method.bound`."""
        ...


def nelbo(method: Method) -> Estimator:
    """The bound of the method's own process, including the terms at t = 0 and t = 1. Exact for causal methods.

    Of models with memory it is `path`.
    """
    return path(method) if method.config.model.memory else method.bound


def any_order(method: Method) -> Estimator:
    """sum_k (1/k) E sum over k masked tokens of -log p: the same bound, sampling the number of masks, not the time.

    The time only determines how many tokens are masked. So for a network without time conditioning, and a schedule from
    all visible to all masked, the expectation is the same; k >= 1, so the weight L/k is always defined.
    """
    config = method.config
    if not method.any_order:
        raise UserError(f"estimator any-order needs beliefs in masked tokens, and {config.method} has none; use nelbo")
    ends = cast(MaskedDiffusion, method).schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64))
    if config.data.pad == "attended":
        raise UserError(
            "estimator any-order counts masks of the text, and data.pad attended masks padding too; use nelbo"
        )
    if config.model.time_conditioning:
        raise UserError("estimator any-order needs model.time_conditioning false; use nelbo")
    if config.time.steps or config.time.sigma:
        raise UserError(f"estimator any-order needs continuous time, and time.steps is {config.time.steps}; use nelbo")
    if ends[0] != 1 or ends[1] != 0:
        raise UserError(
            f"estimator any-order needs a schedule from all visible to all masked, and schedule.name "
            f"{config.schedule.name} with schedule.eps {config.schedule.eps} has alpha from {float(ends[0]):.4g} to "
            f"{float(ends[1]):.4g}; use nelbo, or schedule.eps=0"
        )
    scorer = cast(MaskedDiffusion, method)

    @torch.no_grad()
    def draw(network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        noised = scorer.counted_noise(x, pad, rng, given)
        with eval_mode(network):
            nats = scorer.masked_nats(network, x, noised, pad)
        return nats / per_token(noised.t.to(nats))

    return draw


def published(method: Method) -> Estimator:
    """The released code's protocol: log-linear with eps 1e-3, t >= 1e-3, no terms at t = 0 and 1. About 0.1% too low.

    The released code uses one sample; replicates have the same expectation, and their spread gives the error.
    """
    config = method.config
    schedule = Schedule(eps=PUBLISHED_EPS)
    time = replace(config.time, t_min=PUBLISHED_EPS, t_max=1.0, masks="independent", power=1.0)
    anchor = replace(config.anchor, gamma=0.0)
    model = replace(config.model, memory=False)
    plain = replace(config, schedule=schedule, time=time, model=model, anchor=anchor, rates=Rates())
    as_published = method_of(plain)

    @torch.no_grad()
    def draw(network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        with eval_mode(network):
            return as_published.loss(network, x, pad, 1.0, rng, **given_option(given)).nats

    return draw


def left_to_right(method: Method) -> Estimator:
    """-log p(x) of sampling each block from left to right, exactly; of block-causal methods."""
    block_causal = _block_causal("left-to-right", method)
    return lambda network, x, pad, rng, given=None: block_causal.left_to_right_nats(network, x, pad, given)


def causal(method: Method) -> Estimator:
    """-log p(x) of the causal model in a block-causal network, exactly."""
    block_causal = _block_causal("causal", method)
    return lambda network, x, pad, rng, given=None: block_causal.causal_nats(network, x, pad, given)


def chained(method: Method) -> Estimator:
    """-log p(x) of a block-causal model that draws a block in one call by its chain, exactly."""
    block_causal = _block_causal("chained", method)
    if not method.config.model.chain:
        raise UserError("estimator chained needs a model with a chain, and model.chain is 0; use left-to-right")
    return lambda network, x, pad, rng, given=None: block_causal.chained_nats(network, x, pad, given)


def _block_causal(estimator: str, method: Method) -> BlockCausal:
    if not isinstance(method, BlockCausal):
        raise UserError(f"estimator {estimator} is for block-causal models, and model.block_length is 0; use any-order")
    return method


def order(method: Method, name: str | None = None, steps: int | None = None) -> Estimator:
    """-log p(x) of the sampler `name`, whose order is a function of the visible tokens, exactly: x in place of draws.

    By default in the order `default_order`, one token a step. The network is the one that samples: on a GPU in
    bfloat16, with CUDA graphs. Beliefs are not shaped: temperature 1, the whole vocabulary, no repetition penalty.
    """
    if not method.any_order:
        own = "has an exact likelihood of its own; use auto" if method.exact else "has none; use nelbo"
        raise UserError(
            f"estimator order needs beliefs in masked tokens, and {method.config.method} {own}", "estimator"
        )
    name = name or default_order(method)
    if SAMPLERS[name].anchored and not method.anchored:
        raise UserError(
            f"order {name} needs an anchor network, and {method.config.method} has none; use certainty", "order"
        )
    scorer, frozen, anchor_every = cast(MaskedDiffusion, method), FrozenCopy(), method.config.sampling.anchor_every

    def measure(network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        sampling = Sampling(name, min(steps or length, length), anchor_every=anchor_every)
        return scorer.sampler_nats(frozen.get(network), x, pad, sampling, RowRng(0, range(len(x))), given)

    return measure


def path(method: Method, steps: int | None = None) -> Estimator:
    """The bound of the sampler `ancestral` in `steps` steps, by default those of the config: x in place of draws.

    When a token is revealed does not depend on the text. Given all these times -log p(x) is a sum of beliefs, and its
    expectation bounds -log p(x). A replicate draws the times once and calls the network at each of them, as in
    sampling, with what it then remembers. The network is that of `order`, with the same beliefs.
    """
    if not method.any_order:
        raise UserError(
            f"estimator path needs beliefs in masked tokens, and {method.config.method} has none; use nelbo",
            "estimator",
        )
    scorer, frozen = cast(MaskedDiffusion, method), FrozenCopy()
    return lambda network, x, pad, rng, given=None: scorer.path_nats(frozen.get(network), x, pad, rng, given, steps)


def default_order(method: Method) -> str:
    """The model's own sampler if its order has a likelihood, else left-to-right."""
    sampler = method.config.sampling.sampler
    return sampler if sampler in ORDERS else "left-to-right"


def default_estimator(method: Method) -> str:
    """any-order where it is valid, else nelbo: the lowest variance for the same expectation.

    A model with an order of its own has two bounds: nelbo is that of its order, any-order that of a random one. So has
    one with memory: path is that of sampling with it, any-order that of sampling without.
    """
    if method.config.model.memory:
        return "path"
    if method.config.rates.rule != "none":
        return "nelbo"
    try:
        any_order(method)
    except UserError:
        return "nelbo"
    return "any-order"


ESTIMATORS: dict[str, Callable[[Method], Estimator]] = {
    "nelbo": nelbo,
    "any-order": any_order,
    "published": published,
    "left-to-right": left_to_right,
    "causal": causal,
    "chained": chained,
    "order": order,
    "path": path,
}
"""By name; `settings.ESTIMATOR_LINES` says what each is."""


def estimator_of(method: Method, settings: PerplexitySettings) -> Estimator:
    """The estimator that settings name. Methods with an exact likelihood have no other, and refuse an order."""
    if settings.estimator == "order":
        return order(method, settings.order, settings.order_steps)
    if settings.estimator == "path":
        return path(method, settings.order_steps)
    return method.bound if method.exact else ESTIMATORS[settings.estimator_of(method)](method)
