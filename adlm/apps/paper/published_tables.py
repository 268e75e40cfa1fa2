"""The published results of the paper, by table, with the protocol and the caveats of each. Data only.

All are from "Anchored Diffusion Language Model" (arXiv 2505.18456). None is published with a standard error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

PAPER = "arXiv 2505.18456"
BATCH = 512
"""Sequences per step, in every run of the paper."""
NO_ERROR = "no standard error is published, nor how much one training run differs from another"
SIZES = (
    "ADLM has 293M parameters and about twice the linear work of the 170M MDLM; no baseline of its size is published"
)
ONE_DRAW = "published nats are one draw with eps 1e-3, which leaves out about 0.1% (20.62 is about 20.68)"
HEADLINE = "the headline's 25.4% sets ADLM at 65B tokens (24.46) against SEDD at 33B (32.79)"
COUNTED = "the paper counts steps x batch x length / 2 tokens for diffusion, and all of them from left to right"

ResultKind = Literal["perplexity", "card", "accuracy"]


@dataclass(frozen=True)
class EvaluationProtocol:
    """How the results of a table were measured, and the training data of its models."""

    corpora: Mapping[str, tuple[str, ...]]
    """By column: its corpora, by the names of `adlm prepare --list`."""
    splits: Mapping[str, str]
    length: int
    packing: str
    symbols: int
    """Vocabulary size, including the mask. Perplexities per token of different tokenizers are not comparable."""
    tokenizer: str
    trained_on: str


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table."""

    name: str
    """The name for --row."""
    title: str
    figures: Mapping[str, float]
    """By column."""
    method: str = ""
    """Our name of the method; empty where we have none."""
    tokens: float | None = None
    """Training tokens in billions, as the paper counts them; None where it does not say."""
    parameters: float | None = None
    """In millions."""
    options: Mapping[str, float | str] = field(default_factory=dict)
    """What distinguishes it from other rows of the method: gamma, tau, steps, and a prefix of the sampler's name."""
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedTable:
    name: str
    title: str
    source: str
    kind: ResultKind
    units: Mapping[str, str]
    """By column."""
    rows: tuple[PublishedRow, ...]
    caveats: tuple[str, ...]
    protocol: EvaluationProtocol | None = None


@dataclass(frozen=True)
class Entry:
    """One published number with its source and caveats."""

    table: str
    row: str
    title: str
    column: str
    figure: float
    unit: str
    source: str
    caveats: tuple[str, ...]


def entries(table: PublishedTable) -> Iterator[Entry]:
    for row in table.rows:
        for column, figure in row.figures.items():
            caveats = (*table.caveats, *row.caveats)
            unit = table.units[column]
            yield Entry(table.name, row.name, row.title, column, figure, unit, table.source, caveats)


PPL = "perplexity"
OWT = EvaluationProtocol(
    {PPL: ("openwebtext",)}, {PPL: "valid"}, 1024, "packed-published", 50_258, "GPT-2's", "openwebtext"
)
LM1B = EvaluationProtocol({PPL: ("lm1b",)}, {PPL: "test"}, 128, "padded-published", 30_522, "BERT's (uncased)", "lm1b")
SEVEN = {
    "lambada": ("lambada",),
    "ptb": ("ptb",),
    "wikitext": ("wikitext2", "wikitext103"),
    "lm1b": ("lm1b",),
    "ag_news": ("ag_news",),
    "pubmed": ("pubmed",),
    "arxiv": ("arxiv",),
}
ZERO_SHOT_SPLITS = dict.fromkeys(SEVEN, "valid") | dict.fromkeys(("lambada", "lm1b", "ag_news"), "test")
ZERO_SHOT = EvaluationProtocol(SEVEN, ZERO_SHOT_SPLITS, 1024, "packed-published", 50_258, "GPT-2's", "openwebtext")
SIZES_OF = {"adlm": 293.19, "mdlm": 170.0}
"""Millions of parameters."""
SHAPING: Mapping[str, float | str] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 0.9,
    "nucleus": "published",
    "repetition_penalty": 1.0,
}
"""Sampling options of every row of samples."""
GRID_END: Mapping[str, float | str] = {"t_end": 1e-5, "final": "argmax"}
"""Options of every diffusion sampler."""
LOOP: Mapping[str, float | str] = {"eta": 0.02, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9}
"""Options of remdm-loop."""
TWO_AR = "the paper's tables give 17.54 and 17.53 for AR at 262B"


def _perplexity(
    name: str, title: str, method: str, tokens: float, figure: float, caveats: tuple[str, ...] = (), **options: float
) -> PublishedRow:
    return PublishedRow(name, title, {PPL: figure}, method, tokens, SIZES_OF.get(method), options, caveats)


def _ablation(option: str, value: float, figure: float) -> PublishedRow:
    options = {"gamma": 3e-3, "tau": 5.0, option: value}
    return PublishedRow(
        f"{option}-{value:g}", f"ADLM, {option} {value:g}", {PPL: figure}, "adlm", 78.6, SIZES_OF["adlm"], options
    )


def _zero_shot(name: str, title: str, method: str, tokens: float | None, figures: tuple[float, ...]) -> PublishedRow:
    return PublishedRow(name, title, dict(zip(SEVEN, figures, strict=True)), method, tokens, SIZES_OF.get(method))


def _generation(
    name: str, title: str, method: str, figures: tuple[float, float, float], **options: float | str
) -> PublishedRow:
    return PublishedRow(
        name, title, dict(zip(GENERATION, figures, strict=True)), method, None, SIZES_OF.get(method), options
    )


def published_sampling(sampler: str) -> dict[str, float | str]:
    """The published `sampling` options of a sampler, except the number of steps."""
    settings = dict(SHAPING)
    if sampler != "left-to-right":
        settings |= GRID_END
    if sampler == "remdm-loop":
        settings |= LOOP
    return settings


def _reasoning(name: str, title: str, *figures: float, **more: float) -> PublishedRow:
    return PublishedRow(name, title, dict(zip(("gsm8k", "prontoqa", "prosqa"), figures, strict=True)) | more, name)


GENERATION = {"mauve": "MAUVE", "gen-ppl": "generative perplexity", "entropy": "entropy, nats"}
REASONING = {"gsm8k": "% right", "prontoqa": "% right", "prosqa": "% right", "prosqa_tokens": "generated tokens"}
DECIMALS = {PPL: 2, "MAUVE": 3, "generative perplexity": 1, "entropy, nats": 2, "% right": 1, "generated tokens": 1}
"""By unit, as published."""
ABLATION_STEPS = "300,000 steps, 78.6B tokens as the paper counts them"

TABLES: dict[str, PublishedTable] = {
    "owt-ppl": PublishedTable(
        "owt-ppl",
        "perplexity on OpenWebText's held-out documents",
        f"{PAPER}, test perplexities on OWT; rows of A2R and ar-110B, its section on anchored AR",
        "perplexity",
        {PPL: PPL},
        (
            _perplexity("ar-110B", "AR", "ar", 110, 17.94),
            _perplexity("a2r-110B", "A2R", "a2r", 110, 17.29),
            _perplexity("mdlm-110B", "MDLM", "mdlm", 110, 24.04),
            _perplexity("adlm-110B", "ADLM", "adlm", 110, 21.66, gamma=3e-3, tau=5),
            _perplexity("ar-262B", "AR", "ar", 262, 17.54, (TWO_AR,)),
            _perplexity("a2r-262B", "A2R", "a2r", 262, 16.23),
            _perplexity("sedd-262B", "SEDD", "sedd", 262, 24.10),
            _perplexity("mdlm-262B", "MDLM", "mdlm", 262, 23.17),
            _perplexity("two-stage-262B", "ADLM's two networks with gamma 0", "adlm", 262, 21.79, gamma=0),
            _perplexity("adlm-262B", "ADLM", "adlm", 262, 20.62, gamma=3e-3, tau=5),
            _perplexity("ar-524B", "AR", "ar", 524, 17.26),
            _perplexity("a2r-524B", "A2R", "a2r", 524, 15.86),
            _perplexity("mdlm-524B", "MDLM", "mdlm", 524, 22.98),
            _perplexity("bd3lm-524B", "BD3-LM", "", 524, 20.73),
            _perplexity("adlm-524B", "ADLM", "adlm", 524, 20.14, gamma=3e-3, tau=5),
        ),
        (NO_ERROR, SIZES, ONE_DRAW, COUNTED),
        OWT,
    ),
    "lm1b-ppl": PublishedTable(
        "lm1b-ppl",
        "perplexity on LM1B's test split",
        f"{PAPER}, test perplexities on LM1B",
        "perplexity",
        {PPL: PPL},
        (
            _perplexity("ar-33B", "AR", "ar", 33, 22.32),
            _perplexity("sedd-33B", "SEDD", "sedd", 33, 32.79),
            _perplexity("mdlm-33B", "MDLM", "mdlm", 33, 27.04),
            _perplexity("adlm-33B", "ADLM", "adlm", 33, 26.40, gamma=3e-3, tau=5),
            _perplexity("ar-65B", "AR", "ar", 65, 21.55),
            _perplexity("mdlm-65B", "MDLM", "mdlm", 65, 25.49),
            _perplexity("adlm-65B", "ADLM", "adlm", 65, 24.46, (HEADLINE,), gamma=3e-3, tau=5),
        ),
        (NO_ERROR, SIZES, HEADLINE, ONE_DRAW, COUNTED),
        LM1B,
    ),
    "zero-shot": PublishedTable(
        "zero-shot",
        "perplexity of models of OpenWebText on seven other texts",
        f"{PAPER}, zero-shot perplexities",
        "perplexity",
        dict.fromkeys(SEVEN, PPL),
        (
            _zero_shot("adlm-524B", "ADLM", "adlm", 524, (44.32, 95.37, 31.94, 64.43, 55.72, 37.56, 33.69)),
            _zero_shot("mdlm", "MDLM", "mdlm", None, (47.52, 95.26, 32.83, 67.01, 61.15, 41.89, 37.37)),
            _zero_shot("ar", "AR", "ar", None, (51.28, 82.05, 25.75, 51.25, 52.09, 49.01, 41.73)),
        ),
        (
            NO_ERROR,
            SIZES,
            ONE_DRAW,
            "Wikitext is the raw text: copies with <unk>, and stand-ins for any of the seven, do not compare",
            "the paper says validation; its code reads test of LM1B, AG News and LAMBADA",
        ),
        ZERO_SHOT,
    ),
    "generation": PublishedTable(
        "generation",
        "5,000 samples of 1,024 tokens",
        f"{PAPER}, generation: MAUVE, generative perplexity (both GPT-2 large), entropy",
        "card",
        GENERATION,
        (
            _generation("adlm-1024", "ADLM", "adlm", (0.699, 25.4, 5.35), sampler="remdm-loop", steps=1024),
            _generation("adlm-2048", "ADLM", "adlm", (0.788, 20.3, 5.28), sampler="remdm-loop", steps=2048),
            _generation("adlm-4096", "ADLM", "adlm", (0.791, 15.9, 5.19), sampler="remdm-loop", steps=4096),
            _generation("remdm-4096", "ReMDM", "mdlm", (0.656, 17.6, 5.20), sampler="remdm", steps=4096),
            _generation("ar", "AR", "ar", (0.760, 12.1, 5.22)),
            _generation("data", "the data itself", "data", (1.00, 14.8, 5.44)),
        ),
        (
            NO_ERROR,
            SIZES,
            "figures of another judge or featuriser than GPT-2 large do not compare",
            "a low perplexity alone is no merit: the data's own is 14.8; read it with the entropy",
        ),
        OWT,
    ),
    "gamma": PublishedTable(
        "gamma",
        "the weight of the anchor term, on OpenWebText",
        f"{PAPER}, ablation of gamma at 300,000 steps",
        "perplexity",
        {PPL: PPL},
        (_ablation("gamma", 3e-2, 22.39), _ablation("gamma", 3e-3, 22.32), _ablation("gamma", 3e-5, 23.72)),
        (NO_ERROR, ONE_DRAW, COUNTED, ABLATION_STEPS),
        OWT,
    ),
    "tau": PublishedTable(
        "tau",
        "how rare an anchor is, on OpenWebText",
        f"{PAPER}, ablation of tau at 300,000 steps",
        "perplexity",
        {PPL: PPL},
        (
            _ablation("tau", 1, 23.17),
            _ablation("tau", 5, 22.32),
            _ablation("tau", 10, 23.01),
            _ablation("tau", 20, 23.98),
        ),
        (NO_ERROR, ONE_DRAW, COUNTED, ABLATION_STEPS),
        OWT,
    ),
    "reasoning": PublishedTable(
        "reasoning",
        "answers that are right, GPT-2 fine-tuned",
        f"{PAPER}, reasoning: GSM8K, ProntoQA, ProsQA",
        "accuracy",
        REASONING,
        (
            _reasoning("no-cot", "No-CoT", 16.5, 93.8, 76.7),
            _reasoning("pause", "Pause", 16.4, 77.7, 75.9),
            _reasoning("cot", "CoT", 42.9, 98.8, 77.5),
            _reasoning("icot", "iCoT", 30.0, 99.8, 98.2),
            _reasoning("coconut", "Coconut", 34.1, 99.8, 97.0),
            _reasoning("acot", "ACoT", 45.2, 100.0, 97.3, prosqa_tokens=8.2),
        ),
        (NO_ERROR,),
    ),
}
