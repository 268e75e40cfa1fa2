"""The settings of a measurement, with their help texts, and the names it knows. Imports no torch, for `adlm --help`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adlm.errors import UserError
from adlm.registry import ORDERS, SAMPLERS
from adlm.request import Request, option

if TYPE_CHECKING:
    from adlm.methods.method import Method

AUTO = "auto"
ESTIMATOR_LINES = {
    AUTO: "any-order where it is valid, else nelbo: the same bound; of models with memory path",
    "nelbo": "the method's own bound with the terms at t = 0 and 1; exact for ar and a2r",
    "any-order": "the same bound, sampling how many tokens are masked: lower variance, where valid",
    "left-to-right": "block-causal: exact, of sampling each block from left to right",
    "causal": "block-causal: exact, of the causal model that the sampler speculative draws from",
    "chained": "block-causal: exact, of drawing each block in one call by the chain",
    "order": "exact, of revealing tokens in the order of a sampler (--order); adlm and mdlm",
    "path": "the bound of sampling in a number of steps (--order-steps), by sampling: as many calls; adlm and mdlm",
    "published": "the released code's protocol: eps 1e-3, t from 1e-3; about 0.1% too low",
}
"""What `auto` and each of ESTIMATORS (estimators.py) is."""
EXACT = ("left-to-right", "causal", "chained", "order")
"""The estimators that are likelihoods, computed without random numbers."""
ZERO_SHOT = ("lambada", "ptb", "wikitext2", "lm1b", "ag_news", "pubmed", "arxiv")
"""The corpora of the paper's zero-shot table."""
BATCH_TOKENS, BATCH_TOKENS_ON_GPU = 2**13, 2**15
"""Tokens per batch of a measurement by default."""
MAX_REPLICATES = 100_000
MAX_STEPS = 1_000_000
MEASURING = "options for measuring a model"
NORMALISATIONS = {
    "none": "log p(choice, text after | text before): its posterior if all are equally likely",
    "tokens": "the same for each token: choices of several lengths, where long ones lose",
    "characters": "the same for each character",
    "prior": "minus the same after the text of --prior: choices that are rare by themselves",
}
CHOICE_SCORES = {
    "causal": "exact, of the causal model that the sampler speculative draws from",
    "left-to-right": "exact, of sampling each block from left to right",
    "bound": "the bound of masked diffusion, with Monte Carlo errors",
    "infill": "the same of log p(choice | text before and after), for choices of equally many tokens",
}


@dataclass(frozen=True)
class PerplexitySettings(Request):
    """Everything that the nats of a text under a model depend on."""

    estimator: str = option("(default: auto)", AUTO, group=MEASURING, choices=ESTIMATOR_LINES)
    samples: int = option(
        "independent Monte Carlo replicates; one for exact methods",
        4,
        group=MEASURING,
        minimum=1,
        maximum=MAX_REPLICATES,
        remedy="4 to 64 are usual",
    )
    seed: int = option("seed of the random numbers, the same for every model", 0, group=MEASURING, minimum=0)
    batch: int | None = option(
        f"rows per batch (default: {BATCH_TOKENS:,} tokens, {BATCH_TOKENS_ON_GPU:,} on a GPU);\n"
        "does not change the results",
        None,
        group=MEASURING,
        minimum=1,
    )
    max_tokens: int | None = option(
        "measure about N tokens, spread evenly over each text", None, group=MEASURING, minimum=1
    )
    order: str | None = option(
        f"estimator order: the sampler whose order it is, one of {', '.join(ORDERS)}\n"
        "(default: the model's own sampler if it is one of them, else left-to-right)",
        None,
        group=MEASURING,
    )
    order_steps: int | None = option(
        "estimators order and path: steps in which a row, or a text block, is revealed\n"
        "(default: one token a step; path: sampling.steps of the model)",
        None,
        group=MEASURING,
        minimum=1,
        maximum=MAX_STEPS,
    )
    repeats: int | None = None
    """How often a replicate scores each row, at stratified noise levels; by default more than once for short texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats is not None and not 1 <= self.repeats <= MAX_REPLICATES:
            bound = "at least 1" if self.repeats < 1 else f"at most {MAX_REPLICATES:,}"
            raise UserError(f"repeats {self.repeats} must be {bound}")
        if self.order is not None and self.order not in ORDERS:
            if self.order in SAMPLERS:
                raise UserError(
                    f"order {self.order} has no exact likelihood: what it reveals first does not depend on the visible "
                    f"tokens alone; use {', '.join(ORDERS)}",
                    "order",
                )
            from adlm.config.options import unknown_choice_error

            raise UserError(unknown_choice_error("order", self.order, ORDERS), "order")
        options = (("order", self.order, ("order",)), ("order_steps", self.order_steps, ("order", "path")))
        for name, value, estimators in options:
            if value is not None and self.estimator not in estimators:
                names = " or ".join(estimators)
                raise UserError(
                    f"{name} {value} is an option of estimator {names}, not of {self.estimator}; use estimator {names}",
                    name,
                )

    def estimator_of(self, method: "Method") -> str:
        """The name of the estimator used for this method."""
        from adlm.likelihood.estimators import default_estimator

        if method.exact:
            return "exact"
        return default_estimator(method) if self.estimator == AUTO else self.estimator

    def order_of(self, method: "Method") -> str | None:
        """The order that the nats are of; None with other estimators."""
        from adlm.likelihood.estimators import default_order

        return None if self.estimator != "order" else self.order or default_order(method)

    def steps_of(self, method: "Method") -> int | None:
        """The steps in which a row, or a text block, is revealed; None is one token a step, or no steps."""
        by_default = method.config.sampling.steps if self.estimator_of(method) == "path" else None
        return self.order_steps or by_default

    def is_exact(self, method: "Method") -> bool:
        """Whether the nats are -log p itself, computed without random numbers."""
        return method.exact or self.estimator in EXACT

    def replicates(self, method: "Method") -> int:
        return 1 if self.is_exact(method) else self.samples


@dataclass(frozen=True)
class ChoiceSettings(Request):
    """How the choices of a hole are scored."""

    normalise: str = option("(default: none)", "none", group=MEASURING, choices=NORMALISATIONS)
    prior: str | None = option(
        "normalise prior: a text with a hole and without the input, such as 'Topic: [MASK]'\n(default: the hole alone)",
        None,
        group=MEASURING,
        metavar="TEXT",
    )
    score: str | None = option(
        "causal and left-to-right are for block-causal models, infill for the other diffusion models\n"
        "(default: causal if it was trained, else left-to-right; other models: bound, which is exact for ar and a2r)",
        None,
        group=MEASURING,
        choices=CHOICE_SCORES,
    )
    samples: int = option(
        "masked versions of every filled text, an even number; exact models need none",
        64,
        group=MEASURING,
        minimum=2,
        maximum=MAX_REPLICATES,
    )
    seed: int = option("seed of the masks, the same for every choice", 0, group=MEASURING, minimum=0)
    batch: int | None = option(
        f"rows per batch (default: {BATCH_TOKENS:,} tokens, {BATCH_TOKENS_ON_GPU:,} on a GPU);\n"
        "does not change the results",
        None,
        group=MEASURING,
        minimum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None and self.normalise != "prior":
            raise UserError(
                f"prior is an option of normalise prior, not of {self.normalise}; use normalise prior", "prior"
            )
