"""The published tables of the paper, and results of models to compare with them, from JSON files. Measures nothing.

The tables, with their protocols and caveats, are in published_tables.yaml; the files are of `adlm perplexity`, of
`adlm judge`, or accuracies. A result that is not comparable with the published one has the reasons, whatever its value.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from adlm.apps.plots import CardPoint, CardPoints, PublishedPoint
from adlm.errors import UserError, printable
from adlm.files import read_json
from adlm.likelihood.text_sets import INCOMPARABLE
from adlm.registry import METHODS

PAPER = "arXiv 2505.18456"
ResultKind = Literal["perplexity", "card", "accuracy"]


@dataclass(frozen=True)
class EvaluationProtocol:
    """How the results of a table were measured, and the training data of its models."""

    corpora: Mapping[str, list[str]]
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
    """A table of the paper."""

    name: str
    title: str
    source: str
    kind: ResultKind
    units: Mapping[str, str]
    """By column."""
    rows: tuple[PublishedRow, ...]
    caveats: tuple[str, ...]
    protocol: EvaluationProtocol | None = None


_RAW: dict[str, Any] = yaml.safe_load(
    files("adlm.apps.paper").joinpath("published_tables.yaml").read_text(encoding="utf-8")
)


def _caveats(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_RAW["caveats"][name] for name in entry.get("caveats", ()))


def _table(name: str, entry: dict[str, Any]) -> PublishedTable:
    """The record of a table; the figures of its rows are in the order of its columns."""
    rows = tuple(
        PublishedRow(
            **row
            | {"figures": dict(zip(entry["units"], row["figures"], strict=False)), "caveats": _caveats(row)}
            | {"parameters": _RAW["parameters"].get(row.get("method"))}
        )
        for row in entry["rows"]
    )
    protocol = EvaluationProtocol(**_RAW["protocols"][entry["protocol"]]) if "protocol" in entry else None
    record = {"name": name, "source": f"{PAPER}, {entry['source']}", "rows": rows, "caveats": _caveats(entry)}
    return PublishedTable(**{**entry, **record, "protocol": protocol})


TABLES = {name: _table(name, entry) for name, entry in _RAW["tables"].items()}
DECIMALS: dict[str, int] = _RAW["decimals"]
"""By unit, as published."""
BATCH: int = _RAW["batch"]
"""Sequences per step, in every run of the paper."""
JUDGES: list[str] = _RAW["judges"]
"""Names of the model behind published generative perplexities and MAUVE."""


def published_sampling(sampler: str) -> dict[str, float | str]:
    """The published `sampling` options of a sampler, except the number of steps."""
    options = _RAW["sampling"]
    diffusion = {} if sampler == "left-to-right" else options["diffusion"]
    return {**options["every_row"], **diffusion, **options["samplers"].get(sampler, {})}


SAMPLES, SAMPLE_LENGTH = 5_000, 1_024
CARD_FORMAT = 1
"""The format of the cards that are read."""
MADE_BY = {"perplexity": "adlm perplexity --out", "card": "adlm judge --out", "accuracy": "accuracies"}
ACCURACIES = '{"method": "acot", "accuracy": {"gsm8k": {"right": 596, "of": 1319}}}'
DEFAULTS = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}
"""Sampling options that a plot names where they have other values."""
OTHER_SAMPLING = "the samples were drawn with other settings than the published ones"


@dataclass(frozen=True)
class Result:
    """One measured number of one of our models."""

    model: str
    method: str
    column: str
    value: float
    errors: Mapping[str, float | None]
    """Standard errors by source, in the unit of the value; None where unknown."""
    how: str
    """The estimator, the judge or the featuriser."""
    incomparable: tuple[str, ...] = ()
    """Why it is not comparable with the published number."""
    differs: tuple[str, ...] = ()
    """Settings that differ from those of the table."""
    partial: str = ""
    """Where the errors do not cover all sources: which they cover."""
    options: Mapping[str, float | str] = field(default_factory=dict)
    tokens: float | None = None
    """Training tokens in billions, as the paper counts them; None where unknown."""
    parameters: float | None = None
    """In millions."""

    @property
    def stderr(self) -> float | None:
        """The known errors combined; None where none is known."""
        known = [error for error in self.errors.values() if error is not None]
        return math.hypot(*known) if known else None


def is_causal(method: str) -> bool:
    """Whether a method, as named in a file or a published table, writes from left to right."""
    return method in METHODS and bool(METHODS[method].causal)


def read_results(path: Path) -> dict[str, Any]:
    """The content of a JSON file of one of the three kinds."""
    content = read_json(path)
    if kind_of(content) is None:
        raise UserError(
            f"{path} is neither what `adlm perplexity --out` nor what `adlm judge --out` writes, nor accuracies "
            f"({ACCURACIES})"
        )
    return dict(content)


def kind_of(content: Any) -> ResultKind | None:
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("figures"), list) and content["figures"]:
        return "perplexity"
    if content.get("card") == CARD_FORMAT:
        return "card"
    is_accuracy = isinstance(content.get("accuracy"), dict) and isinstance(content.get("method"), str)
    return "accuracy" if is_accuracy else None


def results_of(content: Mapping[str, Any], table: PublishedTable, name: str) -> list[Result]:
    """The results for this table in a file; a UserError if there are none."""
    kind = kind_of(content)
    if kind != table.kind:
        assert kind is not None
        raise UserError(
            f"{name} is of `{MADE_BY[kind]}`, and table {table.name} is compared with `{MADE_BY[table.kind]}`"
        )
    with _damage_reported(name):
        if kind == "perplexity":
            results = list(_perplexities(content["figures"], table, name))
        elif kind == "card":
            results = list(_card_results(content, table))
        else:
            results = list(_accuracies(content, table, name))
    _check_types(results, name)
    if not results:
        raise UserError(f"{name} holds nothing for table {table.name}, which is of {', '.join(table.units)}")
    return results


@contextmanager
def _damage_reported(name: str) -> Iterator[None]:
    """Entries that are missing or of another type become user errors that name the file."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{name} is incomplete: it has no {error}; make it again") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{name} is damaged ({error}); make it again") from None


def _check_types(results: Sequence[Result], name: str) -> None:
    for result in results:
        numbers = (result.value, *result.errors.values(), result.tokens, result.parameters)
        if not all(_is_number(value) for value in numbers if value is not None):
            raise UserError(f"{name} is damaged: its {result.column} {result.value!r} is not a number; make it again")
        strings = (result.model, result.method, result.how)
        valid_options = all(isinstance(value, str) or _is_number(value) for value in result.options.values())
        if not all(isinstance(text, str) for text in strings) or not valid_options:
            raise UserError(f"{name} is damaged: {result.column} does not name model and method; make it again")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _perplexities(figures: list[dict[str, Any]], table: PublishedTable, name: str) -> Iterator[Result]:
    protocol = table.protocol
    assert protocol is not None
    columns = {corpus: column for column, corpora in protocol.corpora.items() for corpus in corpora}
    in_table = [figure for figure in figures if figure["corpus"] in columns]
    if not in_table and len(protocol.corpora) > 1:
        corpora = ", ".join(dict.fromkeys(figure["corpus"] for figure in figures))
        raise UserError(f"{name} has figures on {corpora}, and table {table.name} is of {', '.join(columns)}")
    for figure in in_table or figures:
        column, about = columns.get(figure["corpus"], next(iter(protocol.corpora))), figure["about"]
        perplexity, estimator = figure["perplexity"], figure["estimator"]
        if perplexity is None:
            raise UserError(f"{name}: the perplexity of {figure['model']} on {figure['corpus']} is too large a number")
        nats_errors = {"monte_carlo": figure["monte_carlo_stderr"], "documents": figure["document_stderr"]}
        other_estimator = [] if estimator in ("published", "exact") else [f"estimator {estimator}, not published"]
        yield Result(
            model=figure["model"],
            method=figure["method"],
            column=column,
            value=perplexity,
            # d exp(nats) = exp(nats) d nats
            errors={source: None if error is None else error * perplexity for source, error in nats_errors.items()},
            how=estimator,
            incomparable=tuple(_text_differences(figure, protocol, column)),
            differs=(*other_estimator, *_training_differences(about, protocol)),
            options={option: about[option] for option in ("gamma", "tau") if about[option] is not None},
            tokens=_billions_trained(about, figure["method"]),
            parameters=about["parameters"] / 1e6,
        )


def _text_differences(figure: Mapping[str, Any], protocol: EvaluationProtocol, column: str) -> Iterator[str]:
    if figure["corpus"] not in protocol.corpora[column]:
        yield f"the text is {figure['corpus']}, not {' or '.join(protocol.corpora[column])}"
    elif figure["split"] != protocol.splits[column] and not any(INCOMPARABLE in note for note in figure["notes"]):
        yield f"the split is {figure['split']}, not {protocol.splits[column]}"
    yield from (note for note in figure["notes"] if INCOMPARABLE in note)
    yield from _tokenizer_differences(figure["about"], protocol)
    if figure["length"] != protocol.length:
        yield f"rows of {figure['length']:,} tokens, not {protocol.length:,}"
    if figure["packing"] != protocol.packing:
        yield f"packing {figure['packing']}, not {protocol.packing}"


def _tokenizer_differences(about: Mapping[str, Any], protocol: EvaluationProtocol) -> Iterator[str]:
    symbols = about["symbols"]
    if symbols != protocol.symbols:
        yield f"a tokenizer of {symbols:,} symbols, not {protocol.tokenizer} {protocol.symbols:,}"


def _training_differences(about: Mapping[str, Any], protocol: EvaluationProtocol) -> Iterator[str]:
    if about["trained_on"] != protocol.trained_on:
        yield f"trained on {about['trained_on'] or 'an unknown text'}, not {protocol.trained_on}"


def _billions_trained(about: Mapping[str, Any], method: str) -> float | None:
    """Training tokens as the paper counts them: half for masked diffusion, all for causal models."""
    trained = about["tokens_trained"]
    return None if trained is None else trained / (1 if is_causal(method) else 2) / 1e9


def _card_results(card: Mapping[str, Any], table: PublishedTable) -> Iterator[Result]:
    """Metrics of the samples, and of the reference texts where they were judged too."""
    protocol, samples = table.protocol, card["samples"]
    assert protocol is not None
    made_by, sampling = samples["made_by"], samples["made_by"]["sampling"]
    about, method = made_by["about"], made_by["method"]
    num_differs = [] if samples["num"] == SAMPLES else [f"{samples['num']:,} samples, not {SAMPLES:,}"]
    published = published_sampling("left-to-right" if is_causal(method) else sampling["sampler"])
    sampling_differs = [
        f"{option} {sampling[option]}, not {value}" for option, value in published.items() if sampling[option] != value
    ]
    reasons = [*_tokenizer_differences(about, protocol)]
    for canvas in made_by["canvases"]:
        masks = re.fullmatch(r"\[MASK\*(\d+)\]", canvas)
        if masks is None:
            reasons.append("samples that began with a given text")
        elif int(masks[1]) != SAMPLE_LENGTH:
            reasons.append(f"samples of {int(masks[1]):,} tokens, not {SAMPLE_LENGTH:,}")
    reasons += [OTHER_SAMPLING] * bool(sampling_differs)
    for result in _metrics_of(card, tuple(reasons)):
        yield replace(
            result,
            model=made_by["model"],
            method=method,
            differs=(*num_differs, *sampling_differs, *_training_differences(about, protocol)),
            options={"sampler": sampling["sampler"], "steps": sampling["steps"]},
            tokens=_billions_trained(about, method),
            parameters=about["parameters"] / 1e6,
        )
    if not card.get("reference_judged"):
        return
    reference, source = card["reference"], card["reference"].get("source")
    reasons = [] if source == "openwebtext" else [f"the text is {source}, not openwebtext"]
    if reference.get("row_length") != SAMPLE_LENGTH:
        reasons.append(f"rows of {reference.get('row_length')} tokens, not {SAMPLE_LENGTH:,}")
    for result in _metrics_of(card["reference_judged"], tuple(reasons)):
        yield replace(result, model=str(reference["place"]), method="data")


def _metrics_of(metrics: Mapping[str, Any], reasons: tuple[str, ...]) -> Iterator[Result]:
    """The metrics of a card, without model and method; `reasons` make each of them not comparable."""
    mauve, perplexity, entropy = (metrics.get(metric) for metric in ("mauve", "perplexity", "entropy"))
    if mauve is not None and mauve["value"] is not None:
        featuriser = mauve["featuriser"]["name"]
        incomparable = (*_label_reasons(featuriser, "the features are of", mauve["label"]), *reasons)
        partial = "the spread over k-means seeds alone, no error over samples"
        errors = {"seeds": mauve["spread"]}
        yield Result("", "", "mauve", mauve["value"], errors, featuriser, incomparable, partial=partial)
    if perplexity is not None and perplexity["pooled"]["value"] is not None:
        judge, pooled = perplexity["judge"]["name"], perplexity["pooled"]
        incomparable = (*_label_reasons(judge, "the judge is", perplexity["label"]), *reasons)
        yield Result("", "", "gen-ppl", pooled["value"], {"samples": pooled["stderr"]}, judge, incomparable)
    if entropy is not None and entropy["value"] is not None:
        yield Result("", "", "entropy", entropy["value"], {"samples": entropy["stderr"]}, "", reasons)


def _label_reasons(judge: str, prefix: str, label: str | None) -> tuple[str, ...]:
    """The reasons in the label of a metric; without a label, whether the judge is GPT-2 large."""
    if label:
        return (label.partition(": ")[2] or label,)
    return () if judge in JUDGES else (f"{prefix} {judge}, not GPT-2 large",)


def _accuracies(content: Mapping[str, Any], table: PublishedTable, name: str) -> Iterator[Result]:
    """Accuracies in percent. The binomial error has two right and two wrong answers added [Agresti].

    So it is not 0 where all answers are right.
    """
    for column, accuracy in content["accuracy"].items():
        right, num = accuracy["right"], accuracy["of"]
        if column not in table.units or not 0 <= right <= num or num < 1:
            raise UserError(f"{name}: {column} with {right} right of {num} is not an accuracy of table {table.name}")
        share = (right + 2) / (num + 4)
        errors = {"problems": 100 * math.sqrt(share * (1 - share) / (num + 4))}
        yield Result(name, content["method"], column, 100 * right / num, errors, f"of {num:,}")


def card_points(cards: Mapping[str, Mapping[str, Any]]) -> CardPoints:
    """The points that metric cards, given by file name, have in a plot."""
    table = TABLES["generation"]
    published = []
    for row in table.rows:
        sampler, steps = str(row.options.get("sampler", "")), int(row.options.get("steps", 0)) or None
        published.append(PublishedPoint(row.title, row.method, sampler, steps, row.figures))
    points = CardPoints([], [], [], published, PAPER)
    for name, card in cards.items():
        with _damage_reported(name):
            results = list(_card_results(card, table))
            _check_types(results, name)
            of_samples = {each.column: each for each in results if each.method != "data"}
            of_reference = {each.column: each for each in results if each.method == "data"}
            series = _describe_samples(card) if of_samples else {}
            reference = {"series": "reference", "model": "", "options": (), "method": "data", "steps": None}
            if {"gen-ppl", "entropy"} <= of_samples.keys():
                label = card["perplexity"]["label"]
                points.perplexities.append(_point(series, of_samples["gen-ppl"], of_samples["entropy"], label))
            if "mauve" in of_samples:
                points.mauves.append(_point(series, of_samples["mauve"], None, card["mauve"]["label"]))
            if {"gen-ppl", "entropy"} <= of_reference.keys():
                points.references.append(_point(reference, of_reference["gen-ppl"], of_reference["entropy"], None))
    return points


def _point(series: dict[str, Any], result: Result, entropy: Result | None, label: str | None) -> CardPoint:
    """A result at the entropy of its samples, or else at their sampling steps."""
    x, x_error = (series["steps"] or math.nan, 0.0) if entropy is None else (entropy.value, entropy.stderr or 0.0)
    return CardPoint(
        **series,
        judge=printable(result.how),
        xy=(float(x), float(result.value)),
        errors=(x_error, result.stderr or 0.0),
        label=label and printable(label),
        comparable=not result.incomparable and not (entropy and entropy.incomparable),
    )


def _describe_samples(card: Mapping[str, Any]) -> dict[str, Any]:
    made_by, sampling = card["samples"]["made_by"], card["samples"]["made_by"]["sampling"]
    name, method = printable(Path(made_by["model"]).name), printable(made_by["method"])
    causal = is_causal(method)
    model = name if method in name.lower() else f"{name} ({method})"
    return {
        "series": model if causal else f"{model}, {printable(sampling['sampler'])}",
        "model": model,
        "options": tuple(
            f"{option} {sampling[option]:g}" for option, default in DEFAULTS.items() if sampling[option] != default
        ),
        "method": method,
        "steps": None if causal else int(sampling["steps"]),
    }
