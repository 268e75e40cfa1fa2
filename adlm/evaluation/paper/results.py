"""What was measured of a model, whoever wrote it down: `adlm perplexity`, `adlm judge`, or accuracies. Runs nothing.

All three are JSON. A finding that cannot stand beside the published figure says why, whatever its value is.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.evaluation.generation.card import FORMAT, GPT2_LARGE
from adlm.evaluation.paper.published_tables import Kind, Protocol, PublishedTable, published_sampling
from adlm.files import read_json
from adlm.likelihood.text_sets import INCOMPARABLE

SAMPLES, SAMPLE_LENGTH = 5_000, 1_024
MADE_BY = {"perplexity": "adlm perplexity --out", "card": "adlm judge --out", "accuracy": "accuracies"}
ACCURACIES = '{"method": "acot", "accuracy": {"gsm8k": {"right": 596, "of": 1319}}}'
MAX_FLOAT = sys.float_info.max
LEFT_TO_RIGHT = ("ar", "a2r")
OTHER_SAMPLING = "the samples were drawn with other settings than the published ones"


@dataclass(frozen=True)
class Result:
    """A figure of ours."""

    model: str
    method: str
    column: str
    value: float
    errors: Mapping[str, float | None]
    """Standard errors by what they are over, in the value's unit; None where one is not known."""
    how: str
    """The estimator, or who judged."""
    incomparable: tuple[str, ...] = ()
    """What keeps it from standing beside the published figure."""
    differs: tuple[str, ...] = ()
    """Settings that are not the table's."""
    partial: str = ""
    """Where the errors are not all there is: what they are."""
    knobs: Mapping[str, float | str] = field(default_factory=dict)
    tokens: float | None = None
    """Trained on, in billions, as the paper counts; None where that is not known."""
    parameters: float | None = None
    """In millions."""

    @property
    def stderr(self) -> float | None:
        """Of all together; None where none is known."""
        known = [error for error in self.errors.values() if error is not None]
        return math.hypot(*known) if known else None


def read_results(path: Path) -> dict[str, Any]:
    """A JSON that one of the commands wrote."""
    told = read_json(path)
    if kind_of(told) is None:
        raise UserError(
            f"{path} is neither what `adlm perplexity --out` nor what `adlm judge --out` writes, nor accuracies "
            f"({ACCURACIES})"
        )
    return dict(told)


def kind_of(told: Any) -> Kind | None:
    if not isinstance(told, dict):
        return None
    if isinstance(told.get("figures"), list) and told["figures"]:
        return "perplexity"
    if told.get("card") == FORMAT:
        return "card"
    return "accuracy" if isinstance(told.get("accuracy"), dict) and isinstance(told.get("method"), str) else None


def results_of(told: Mapping[str, Any], table: PublishedTable, name: str) -> list[Result]:
    """What it holds for this table; a UserError where that is nothing."""
    kind = kind_of(told)
    if kind != table.kind:
        assert kind is not None
        raise UserError(
            f"{name} is of `{MADE_BY[kind]}`, and table {table.name} is held against `{MADE_BY[table.kind]}`"
        )
    try:
        if kind == "perplexity":
            found = list(_perplexities(told["figures"], table, name))
        elif kind == "card":
            found = [*_generated(told, table), *_reference(told)]
        else:
            found = list(_accuracies(told, table, name))
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{name} is not whole: it has no {error}; make it again") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{name} is damaged ({error}); make it again") from None
    for finding in found:
        numbers = (finding.value, *finding.errors.values(), finding.tokens, finding.parameters)
        if not all(_is_number(value) for value in numbers if value is not None):
            raise UserError(f"{name} is damaged: its {finding.column} {finding.value!r} is no number; make it again")
        words = (finding.model, finding.method, finding.how)
        if not all(isinstance(word, str) for word in words) or not all(map(_is_setting, finding.knobs.values())):
            raise UserError(f"{name} is damaged: {finding.column} does not tell model and method; make it again")
    if not found:
        raise UserError(f"{name} holds nothing for table {table.name}, which is of {', '.join(table.units)}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_FLOAT


def _is_setting(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def paper_count(tokens: float, method: str) -> float:
    """Tokens as the paper counts them: half of them where they are masked, all from left to right."""
    return tokens if method in LEFT_TO_RIGHT else tokens / 2


def _perplexities(figures: list[dict[str, Any]], table: PublishedTable, name: str) -> Iterator[Result]:
    protocol = table.protocol
    assert protocol is not None
    columns = {corpus: column for column, corpora in protocol.corpora.items() for corpus in corpora}
    there = [figure for figure in figures if _corpus(figure) in columns]
    if not there and len(protocol.corpora) > 1:
        corpora = ", ".join(dict.fromkeys(_corpus(figure) for figure in figures))
        raise UserError(f"{name} has figures on {corpora}, and table {table.name} is of {', '.join(columns)}")
    for figure in there or figures:
        column = columns.get(_corpus(figure), next(iter(protocol.corpora)))
        about = figure.get("about") or {}
        if figure["perplexity"] is None:
            raise UserError(f"{name}: the perplexity of {figure['model']} on {_corpus(figure)} is too large a number")
        yield Result(
            model=figure["model"],
            method=figure["method"],
            column=column,
            value=figure["perplexity"],
            errors={
                "draws": _times(figure["monte_carlo_stderr"], figure["perplexity"]),
                "documents": _times(figure["document_stderr"], figure["perplexity"]),
            },
            how=figure["estimator"],
            incomparable=tuple(_other_text(figure, protocol, column)),
            differs=tuple(_other_settings(figure, protocol)),
            knobs={knob: about[knob] for knob in ("gamma", "tau") if about.get(knob) is not None},
            tokens=_billions_trained(about, figure["method"]),
            parameters=_millions_of_parameters(about),
        )


def _billions_trained(about: Mapping[str, Any], method: str) -> float | None:
    trained = about.get("tokens_trained")
    return None if trained is None else paper_count(trained, method) / 1e9


def _millions_of_parameters(about: Mapping[str, Any]) -> float | None:
    return about["parameters"] / 1e6 if "parameters" in about else None


def _corpus(figure: Mapping[str, Any]) -> str:
    return str(figure.get("corpus") or figure["data"])


def _times(error: float | None, perplexity: float) -> float | None:
    """d exp(nats) = exp(nats) d nats."""
    return None if error is None else error * perplexity


def _other_text(figure: Mapping[str, Any], protocol: Protocol, column: str) -> Iterator[str]:
    if _corpus(figure) not in protocol.corpora[column]:
        yield f"the text is {_corpus(figure)}, not {' or '.join(protocol.corpora[column])}"
    elif figure["split"] != protocol.splits[column] and not any(INCOMPARABLE in note for note in figure["notes"]):
        yield f"the split is {figure['split']}, not {protocol.splits[column]}"
    yield from (note for note in figure["notes"] if INCOMPARABLE in note)
    yield from _other_tokenizer(figure.get("about") or {}, protocol)
    if figure["length"] != protocol.length:
        yield f"rows of {figure['length']:,} tokens, not {protocol.length:,}"
    if figure["packing"] != protocol.packing:
        yield f"packing {figure['packing']}, not {protocol.packing}"


def _other_settings(figure: Mapping[str, Any], protocol: Protocol) -> Iterator[str]:
    if figure["estimator"] not in ("published", "exact"):
        yield f"estimator {figure['estimator']}, not published"
    yield from _other_model(figure.get("about") or {}, protocol)


def _other_tokenizer(about: Mapping[str, Any], protocol: Protocol) -> Iterator[str]:
    symbols = about.get("symbols")
    if symbols is not None and symbols != protocol.symbols:
        yield f"a tokenizer of {symbols:,} symbols, not {protocol.tokenizer} {protocol.symbols:,}"


def _other_model(about: Mapping[str, Any], protocol: Protocol) -> Iterator[str]:
    if about.get("symbols") is None:
        yield f"whether the tokenizer is {protocol.tokenizer} is not told"
    if about.get("trained_on") != protocol.trained_on:
        yield f"trained on {about.get('trained_on') or 'an unknown text'}, not {protocol.trained_on}"


def _generated(card: Mapping[str, Any], table: PublishedTable) -> Iterator[Result]:
    protocol, samples = table.protocol, card["samples"]
    assert protocol is not None
    made_by, sampling = samples["made_by"], samples["made_by"]["sampling"]
    about = made_by.get("about") or {}
    fewer = [] if samples["num"] == SAMPLES else [f"{samples['num']:,} samples, not {SAMPLES:,}"]
    other_sampling = tuple(_other_sampling(sampling, made_by["method"]))
    others = (*_other_tokenizer(about, protocol), *_other_lengths(made_by["canvases"]))
    if other_sampling:
        others += (OTHER_SAMPLING,)
    for judged in _judged(card, others):
        yield replace(
            judged,
            model=made_by["model"],
            method=made_by["method"],
            differs=(*fewer, *other_sampling, *_other_model(about, protocol)),
            knobs={"sampler": sampling["sampler"], "steps": sampling["steps"]},
            tokens=_billions_trained(about, made_by["method"]),
            parameters=_millions_of_parameters(about),
        )


def _other_sampling(sampling: Mapping[str, Any], method: str) -> Iterator[str]:
    sampler = "left-to-right" if method in LEFT_TO_RIGHT else sampling["sampler"]
    for setting, published in published_sampling(sampler).items():
        if sampling[setting] != published:
            yield f"{setting} {sampling[setting]}, not {published}"


def _reference(card: Mapping[str, Any]) -> Iterator[Result]:
    """The data itself, where the card's reference was judged too."""
    if not card.get("reference_judged"):
        return
    about = card["reference"]
    others = [] if about.get("source") == "openwebtext" else [f"the text is {about.get('source')}, not openwebtext"]
    if about.get("row_length") != SAMPLE_LENGTH:
        others.append(f"rows of {about.get('row_length')} tokens, not {SAMPLE_LENGTH:,}")
    for judged in _judged(card["reference_judged"], tuple(others)):
        yield replace(judged, model=str(about["place"]), method="data")


def _judged(figures: Mapping[str, Any], others: tuple[str, ...]) -> Iterator[Result]:
    """The figures of a card, whosever they are; `others` keep each of them from standing beside published ones."""
    mauve, perplexity, entropy = (figures.get(metric) for metric in ("mauve", "perplexity", "entropy"))
    if mauve is not None and mauve["value"] is not None:
        by = mauve["featuriser"]["name"]
        why = (*_labels(by, "the features are of", mauve["label"]), *others)
        partial = "the spread over k-means seeds alone, no error over samples"
        yield Result("", "", "mauve", mauve["value"], {"seeds": mauve["spread"]}, by, why, partial=partial)
    if perplexity is not None and perplexity["pooled"]["value"] is not None:
        by, pooled = perplexity["judge"]["name"], perplexity["pooled"]
        why = (*_labels(by, "the judge is", perplexity["label"]), *others)
        yield Result("", "", "gen-ppl", pooled["value"], {"samples": pooled["stderr"]}, by, why)
    if entropy is not None and entropy["value"] is not None:
        yield Result("", "", "entropy", entropy["value"], {"samples": entropy["stderr"]}, "", others)


def _labels(by: str, who: str, label: str | None) -> tuple[str, ...]:
    if label:
        return (label.partition(": ")[2] or label,)
    return () if by in GPT2_LARGE else (f"{who} {by}, not GPT-2 large",)


def _other_lengths(canvases: list[str]) -> Iterator[str]:
    for canvas in canvases:
        holes = re.fullmatch(r"\[MASK\*(\d+)\]", canvas)
        if holes is None:
            yield "samples that began with a given text"
        elif int(holes[1]) != SAMPLE_LENGTH:
            yield f"samples of {int(holes[1]):,} tokens, not {SAMPLE_LENGTH:,}"


def _accuracies(told: Mapping[str, Any], table: PublishedTable, name: str) -> Iterator[Result]:
    for column, found in told["accuracy"].items():
        right, num = found["right"], found["of"]
        if column not in table.units or not 0 <= right <= num or num < 1:
            raise UserError(f"{name}: {column} with {right} right of {num} is no accuracy of table {table.name}")
        yield Result(
            name, told["method"], column, 100 * right / num, {"problems": _binomial(right, num)}, f"of {num:,}"
        )


def _binomial(right: float, num: float) -> float:
    """In percent; with two right and two wrong answers more, so that it is not 0 where all are right [Agresti]."""
    share = (right + 2) / (num + 4)
    return 100 * math.sqrt(share * (1 - share) / (num + 4))
