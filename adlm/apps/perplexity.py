"""Perplexities of models on texts, for `adlm perplexity` and `adlm reproduce`. No terminal output.

Under torchrun every process measures its share of the groups of rows.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from adlm import __version__
from adlm.config.load import validate
from adlm.config.schema import FormatName
from adlm.data.sources.text_files import files_at
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.measurement import chosen_rows, measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import Estimate, Nats, difference, summarize
from adlm.likelihood.text_sets import ReportProgress, TextSet, text_sets
from adlm.methods import method_of
from adlm.models.transformer import weights_sha256
from adlm.samples_file import ModelSummary, summarize_model
from adlm.tokens import load_tokenizer

MIN_FREEDOM = 3
BOS_EOS_COUNTED = "this packing counts the bos and eos of every row as tokens, as published; packed and padded do not"
LOW_FREEDOM = "the Monte Carlo error is itself uncertain, with fewer than 3 degrees of freedom; raise --samples"


@dataclass(frozen=True)
class PerplexityResult:
    """The perplexity of one model on one text, and everything that it depends on."""

    model: str
    method: str
    data: str
    corpus: str
    """The source of a prepared folder; otherwise the same as `data`."""
    split: str
    nats: float
    bits: float
    perplexity: float | None
    """None where it overflows a float."""
    monte_carlo_stderr: float | None
    """Of `nats`, as is `document_stderr`; times `perplexity` they are standard errors of the perplexity."""
    document_stderr: float | None
    interval: tuple[float, float] | None
    """95% Monte Carlo confidence interval of the bound on this text, in nats per token."""
    exact: bool
    tokens: int
    """Tokens of the text; a published packing also counts the bos and eos of every row."""
    documents: int
    """Number of sampling units of the error over documents."""
    unit: str
    """What they are: document, article, or block (of consecutive documents)."""
    rows: int
    length: int
    packing: str
    tokenizer: str
    tokenizer_sha256: str
    estimator: str
    order: str | None
    """With estimator order, the sampler whose order it is."""
    order_steps: int | None
    """With estimators order and path, the steps in which a row or block is revealed; None is one token a step."""
    samples: int
    seed: int
    about: ModelSummary
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The nats of the first model minus those of another, on the same rows and random numbers."""

    model: str
    against: str
    data: str
    nats: float
    monte_carlo_stderr: float | None
    document_stderr: float | None


@dataclass(frozen=True)
class TextSelection:
    """Which texts are read; empty means the default packing and split of each."""

    names: tuple[str, ...]
    packing: str = ""
    split: str = ""
    format: FormatName = "text"


@dataclass(frozen=True)
class ModelPerplexities:
    """Results, differences, and the journals to delete once the results are written."""

    results: list[PerplexityResult]
    differences: list[Difference]
    journals: list[Path]


def measure_models(
    models: dict[str, LanguageModel],
    selection: TextSelection,
    settings: PerplexitySettings,
    out: Path | None,
    report: ReportProgress,
) -> ModelPerplexities:
    """Measure every model on every text. Finished groups go to a journal next to `out`, so that a rerun resumes.

    `report` is called while texts are tokenized and measured.
    """
    results: list[PerplexityResult] = []
    measured: dict[tuple[str, str], tuple[Nats, TextSet]] = {}
    journals: list[Path] = []
    for model, lm in models.items():
        assert lm.tokenizer is not None  # with_tokenizer sees to it
        with text_sets(
            selection.names,
            lm.tokenizer,
            lm.config.length,
            selection.packing,
            selection.split,
            report=report,
            format=selection.format,
            chat_template=lm.chat_template,
        ) as texts:
            for text in texts:
                if lm.config.data.pad == "masked":  # then the length of rows changes no bound
                    text = replace(text, rows=text.rows.without_common_padding())
                journal = _journal_path(out, lm, text, settings)
                progress = partial(report, f"{model} on {text.name}")
                try:
                    nats = measure_nats(lm.method, lm.network, text.rows, settings, journal, progress)
                except UserError as error:
                    raise UserError(f"{model} on {text.name}: {error}") from None
                measured[model, text.name] = nats, text
                journals += [] if journal is None else [journal]
                results.append(_result(model, lm, text, settings, nats))
    return ModelPerplexities(results, list(_differences(list(models), measured)), journals)


def _differences(models: list[str], measured: dict[tuple[str, str], tuple[Nats, TextSet]]) -> Iterator[Difference]:
    """The first model minus each later one, where both read the same rows."""
    for (model, data), (nats, text) in measured.items():
        first_nats, first_text = measured[models[0], data]
        of_text, of_first = ((each.digest, each.packing, each.rows.length) for each in (text, first_text))
        same_rows = of_text == of_first and len(first_nats.tokens) == len(nats.tokens)
        if model != models[0] and same_rows:
            gap = difference(first_nats, nats)
            yield Difference(models[0], model, data, gap.nats, gap.monte_carlo, gap.over_documents)


def _result(model: str, lm: LanguageModel, text: TextSet, settings: PerplexitySettings, nats: Nats) -> PerplexityResult:
    assert lm.tokenizer is not None
    estimate: Estimate = summarize(nats)
    about = summarize_model(model, lm)
    trained_on_it = text.split == "train" and (
        about.trained_on in (text.name, text.corpus) or bool(_files(lm.config.data.path) & _files(text.name))
    )
    return PerplexityResult(
        model=model,
        method=lm.config.method,
        data=text.name,
        corpus=text.corpus,
        split=text.split,
        nats=estimate.nats,
        bits=estimate.bits,
        perplexity=estimate.perplexity if math.isfinite(estimate.perplexity) else None,
        monte_carlo_stderr=estimate.monte_carlo,
        document_stderr=estimate.over_documents,
        interval=estimate.interval(),
        exact=settings.is_exact(lm.method),
        tokens=estimate.tokens,
        documents=estimate.documents,
        unit=text.unit,
        rows=len(chosen_rows(text.rows, settings.max_tokens)),
        length=text.rows.length,
        packing=text.packing,
        tokenizer=lm.config.tokenizer,
        tokenizer_sha256=lm.tokenizer.sha256,
        estimator=settings.estimator_of(lm.method),
        order=settings.order_of(lm.method),
        order_steps=settings.steps_of(lm.method),
        samples=settings.replicates(lm.method),
        seed=settings.seed,
        about=about,
        notes=(
            *text.notes,
            *[f"{model} was trained on this text or a part of it: not a held-out result"] * trained_on_it,
            *[BOS_EOS_COUNTED] * text.packing.endswith("-published"),
            *_unknown_error(estimate, settings.replicates(lm.method)),
            *[LOW_FREEDOM] * (estimate.monte_carlo is not None and estimate.freedom < MIN_FREEDOM),
        ),
    )


def _unknown_error(estimate: Estimate, replicates: int) -> Iterator[str]:
    """Why the error over documents is unknown, if it is."""
    if estimate.over_documents is None:
        noise = "there is one replicate" if replicates < 2 else "it is too small beside the Monte Carlo error"
        why = "the text is one document" if estimate.documents < 2 else f"{noise}; raise --samples"
        yield f"the error over documents is unknown: {why}"


def _files(pattern: str) -> set[Path]:
    """The text files that a path, a folder or a glob names; none if it names something else."""
    try:
        return {file.resolve() for file in files_at(pattern)} if pattern else set()
    except UserError:
        return set()


def with_tokenizer(lm: LanguageModel, name: str | None, model: str) -> LanguageModel:
    """The model with the tokenizer of --tokenizer, which must fit; `name` None keeps the model's own."""
    if name is None and lm.tokenizer is None:
        raise UserError(f"{model} has no tokenizer, so it cannot read text; give --tokenizer, such as --tokenizer gpt2")
    if name is None:
        return lm
    tokenizer = load_tokenizer(name)
    vocabulary = lm.config.vocabulary
    if vocabulary is not None and tokenizer.vocabulary.size != vocabulary.size:
        raise UserError(
            f"--tokenizer {name} has {tokenizer.vocabulary.size} symbols and {model} was made for {vocabulary.size}; "
            "it is not the one it was trained with"
        )
    if lm.tokenizer is not None and tokenizer.engine.to_str() != lm.tokenizer.engine.to_str():
        raise UserError(f"--tokenizer {name} is not the tokenizer in the folder of {model}; leave --tokenizer out")
    config = validate(replace(lm.config, tokenizer=name, vocabulary=tokenizer.vocabulary))
    return replace(lm, config=config, method=method_of(config), tokenizer=tokenizer)


def _journal_path(out: Path | None, lm: LanguageModel, text: TextSet, settings: PerplexitySettings) -> Path | None:
    """The journal next to `out`; its name has a hash of everything that the nats depend on."""
    if out is None:
        return None
    inputs: dict[str, Any] = {
        "config": asdict(lm.config),
        "weights": weights_sha256(lm.network),
        "rows": (text.digest, text.split, text.packing, len(text.rows), text.rows.length),
        "adlm": __version__,
        "recipe": {**asdict(settings), "batch": 0},
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return out.with_name(f".{out.name}.{digest}")
