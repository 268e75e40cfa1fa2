"""Models measured on texts, figure by figure: what `adlm perplexity` and `adlm reproduce` share. Draws no tables.

Under torchrun every process measures its share of the groups, and the first speaks for all.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from adlm import __version__
from adlm.config.load import validate
from adlm.errors import UserError
from adlm.evaluation.generation.draw_samples import tokenizer_of
from adlm.evaluation.model_summary import ModelSummary, summarize_model
from adlm.language_model import LanguageModel
from adlm.likelihood.estimate import Estimate, Nats, difference, summarize
from adlm.likelihood.perplexity import PerplexitySettings, chosen_rows, measure_nats
from adlm.likelihood.text_sets import TextSet, text_sets
from adlm.methods import method_of
from adlm.models.transformer import weights_sha256
from adlm.tokens import load_tokenizer

FREEDOM = 3
FRAMES_COUNTED = "this packing counts the bos and eos of every row as tokens, as published; packed and padded do not"
FEW_DRAWS = "the error of the draws is itself a guess, by fewer than 3 degrees of freedom; raise --samples"


@dataclass(frozen=True)
class PerplexityResult:
    """One figure, and everything that it depends on."""

    model: str
    method: str
    data: str
    corpus: str
    """What the text is of: the same, or what a prepared folder was made from."""
    split: str
    nats: float
    bits: float
    perplexity: float | None
    """None where no number is so large."""
    monte_carlo_stderr: float | None
    document_stderr: float | None
    interval: tuple[float, float] | None
    """Of 95% for the bound on this text, by the draws, in nats."""
    exact: bool
    tokens: int
    """Of the text; by a published packing also the bos and eos of every row."""
    documents: int
    """How many units the error over documents is over."""
    unit: str
    """What these are: documents, articles, or blocks of consecutive documents that depend on each other."""
    rows: int
    length: int
    packing: str
    tokenizer: str
    tokenizer_sha256: str
    estimator: str
    samples: int
    seed: int
    about: ModelSummary
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The first model minus another, on the same rows and draws."""

    model: str
    against: str
    data: str
    nats: float
    monte_carlo_stderr: float | None
    document_stderr: float | None


@dataclass(frozen=True)
class TextSelection:
    """Which texts are read, and how; empty is as usual for each."""

    names: tuple[str, ...]
    packing: str = ""
    split: str = ""


@dataclass(frozen=True)
class ModelPerplexities:
    """Figures, differences, and the journals that may go once the figures are where they belong."""

    lines: list[PerplexityResult]
    gaps: list[Difference]
    journals: list[Path]


def measure_models(
    models: dict[str, LanguageModel],
    selection: TextSelection,
    settings: PerplexitySettings,
    out: Path | None,
    report: Callable[[str, int, int], None],
) -> ModelPerplexities:
    """Measure every model on every text. Finished groups are kept in a journal beside `out`, so that a rerun resumes.

    `report(name, done, total)` is called after each group of rows.
    """
    results: list[PerplexityResult] = []
    found: dict[tuple[str, str], tuple[Nats, TextSet]] = {}
    journals: list[Path] = []
    for model, lm in models.items():
        with text_sets(
            selection.names, tokenizer_of(lm), lm.config.length, selection.packing, selection.split
        ) as texts:
            for text in texts:
                journal = _journal(out, lm, text, settings)
                progress = partial(report, f"{model} on {text.name}")
                try:
                    nats = measure_nats(lm.method, lm.network, text.rows, settings, journal, progress)
                except UserError as error:
                    raise UserError(f"{model} on {text.name}: {error}") from None
                found[model, text.name] = nats, text
                journals += [] if journal is None else [journal]
                results.append(_line(model, lm, text, settings, nats))
    return ModelPerplexities(results, list(_gaps(list(models), found)), journals)


def _gaps(models: list[str], found: dict[tuple[str, str], tuple[Nats, TextSet]]) -> Iterator[Difference]:
    """Every later model against the first, where both read the same ids, cut alike."""
    for (model, data), (nats, text) in found.items():
        ours, our_text = found[models[0], data]
        cuts = [(each.digest, each.packing, each.rows.length) for each in (text, our_text)]
        if model != models[0] and cuts[0] == cuts[1] and len(ours.tokens) == len(nats.tokens):
            gap = difference(ours, nats)
            yield Difference(models[0], model, data, gap.nats, gap.monte_carlo, gap.over_documents)


def _line(model: str, lm: LanguageModel, text: TextSet, recipe: PerplexitySettings, nats: Nats) -> PerplexityResult:
    found: Estimate = summarize(nats)
    about = summarize_model(model, lm)
    seen = text.split == "train" and about.trained_on in (text.name, text.corpus)
    return PerplexityResult(
        model=model,
        method=lm.config.method,
        data=text.name,
        corpus=text.corpus,
        split=text.split,
        nats=found.nats,
        bits=found.bits,
        perplexity=found.perplexity if math.isfinite(found.perplexity) else None,
        monte_carlo_stderr=found.monte_carlo,
        document_stderr=found.over_documents,
        interval=found.interval(),
        exact=lm.method.exact,
        tokens=found.tokens,
        documents=found.documents,
        unit=text.unit,
        rows=len(chosen_rows(text.rows, recipe.max_tokens)),
        length=text.rows.length,
        packing=text.packing,
        tokenizer=lm.config.tokenizer,
        tokenizer_sha256=tokenizer_of(lm).sha256,
        estimator=recipe.estimator_of(lm.method),
        samples=recipe.replicates(lm.method),
        seed=recipe.seed,
        about=about,
        notes=(
            *text.notes,
            *[f"{model} was trained on this split, so nothing here was held out"] * seen,
            *[FRAMES_COUNTED] * text.packing.endswith("-published"),
            *[FEW_DRAWS] * (found.monte_carlo is not None and found.freedom < FREEDOM),
        ),
    )


def with_tokenizer(lm: LanguageModel, name: str | None, model: str) -> LanguageModel:
    if name is None and lm.tokenizer is None:
        raise UserError(f"{model} has no tokenizer, so it cannot read text; give --tokenizer")
    if name is None:
        return lm
    tokenizer = load_tokenizer(name)
    known = lm.config.vocabulary
    if known is not None and tokenizer.vocabulary.size != known.size:
        raise UserError(
            f"--tokenizer {name} has {tokenizer.vocabulary.size} symbols and {model} was made for {known.size}; "
            "it is not the one it was trained with"
        )
    if lm.tokenizer is not None and tokenizer.engine.to_str() != lm.tokenizer.engine.to_str():
        raise UserError(f"--tokenizer {name} is not the one that {model} brings along; leave --tokenizer out")
    config = validate(replace(lm.config, tokenizer=name, vocabulary=tokenizer.vocabulary))
    return replace(lm, config=config, method=method_of(config), tokenizer=tokenizer)


def _journal(out: Path | None, lm: LanguageModel, text: TextSet, recipe: PerplexitySettings) -> Path | None:
    """Where what is done is kept meanwhile: named after everything that it depends on."""
    if out is None:
        return None
    depends: dict[str, Any] = {
        "config": asdict(lm.config),
        "weights": weights_sha256(lm.network),
        "rows": (text.digest, text.split, text.packing, len(text.rows), text.rows.length),
        "adlm": __version__,
        "recipe": {**asdict(recipe), "batch": 0},
    }
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return out.with_name(f".{out.name}.{digest}")
