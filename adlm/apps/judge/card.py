"""The metric card: metrics of samples, the settings they depend on, and labels where published ones differ. No models.

A card is JSON. Metrics by another judge or featuriser than GPT-2 large, or by another protocol than the published one,
carry a label that says so, in the card, in its table and in every plot.
"""

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from adlm import __version__
from adlm.apps.judge.mauve import ENOUGH_TEXTS, PUBLISHED_LONGEST
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, write_file

FORMAT = 1
GPT2_LARGE = ("gpt2-large", "openai-community/gpt2-large")
PACKAGES = ("torch", "numpy", "transformers", "mauve-text", "faiss-cpu", "scikit-learn")

Card = dict[str, Any]


class CardRow(NamedTuple):
    """A row of the table printed for a card."""

    name: str
    value: str
    """With its standard error."""
    of: str
    reference: str = ""


def versions() -> dict[str, str | None]:
    """Versions of the packages that computed the metrics; None where a package is not installed."""
    found: dict[str, str | None] = {"adlm": __version__, "python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def perplexity_label(perplexity: Mapping[str, Any]) -> str | None:
    """Why this perplexity is not comparable with published ones; None where it is."""
    differences = []
    if perplexity["judge"]["name"] not in GPT2_LARGE:
        differences.append(f"the judge is {perplexity['judge']['name']}, not GPT-2 large")
    for choice, published in (("eos", "published"), ("start", "given"), ("ids", "retokenised")):
        if perplexity[choice] != published:
            differences.append(f"{choice} {perplexity[choice]}, not {published}")
    return f"not comparable with published perplexities: {'; '.join(differences)}" if differences else None


def mauve_label(mauve: Mapping[str, Any]) -> str | None:
    """Why this MAUVE is not comparable with published ones; None where it is."""
    differences, featuriser = [], mauve["featuriser"]
    if featuriser["name"] not in GPT2_LARGE:
        differences.append(f"the features are of {featuriser['name']}, not GPT-2 large")
    elif (featuriser["pooling"], featuriser["longest"]) != ("last", PUBLISHED_LONGEST):
        differences.append(
            f"pooling {featuriser['pooling']} of {featuriser['longest']} tokens, not last of {PUBLISHED_LONGEST}"
        )
    if min(mauve["num_samples"], mauve["num_reference"]) < ENOUGH_TEXTS:
        differences.append(f"of fewer than {ENOUGH_TEXTS:,} texts, where it says more of their number than of them")
    return f"not comparable with published MAUVE: {'; '.join(differences)}" if differences else None


def card_notes(card: Card) -> Iterator[str]:
    """Warnings for the reader of the card."""
    samples, perplexity, mauve = card["samples"], card.get("perplexity"), card.get("mauve")
    if samples["num"] < samples["of"]:
        yield f"the file holds {samples['num']:,} of the {samples['of']:,} samples that were asked for"
    if samples["num_empty"]:
        yield f"{samples['num_empty']:,} samples are empty texts"
    if perplexity is not None and perplexity["num_uncounted"]:
        yield f"{perplexity['num_uncounted']:,} samples have no token that counts, so no perplexity"
    if perplexity is not None and perplexity["num_in_windows"]:
        yield f"{perplexity['num_in_windows']:,} samples: {perplexity['windows']}"
    if mauve is not None and mauve["num_empty_samples"] + mauve["num_empty_reference"]:
        yield f"MAUVE leaves out {mauve['num_empty_samples']} empty samples, {mauve['num_empty_reference']} empty texts"
    if mauve is not None and mauve["num_samples"] != mauve["num_reference"]:
        yield f"MAUVE of {mauve['num_samples']:,} samples against {mauve['num_reference']:,}: equal numbers are usual"
    reference = card.get("reference", {})
    if reference.get("tokenizer_of_samples") is False:
        rows = f", and its rows are {reference['row_length']} tokens of its own" if "row_length" in reference else ""
        yield f"the reference's tokenizer is not the samples', so its entropy and diversity are not computed{rows}"


def write_card(card: Card, path: Path) -> None:
    write_file(path, json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_card(path: Path) -> Card:
    content, card = read_bytes(path), None
    with suppress(ValueError):  # it is not JSON
        card = parse_json(content)
    if not isinstance(card, dict) or card.get("card") != FORMAT:
        raise UserError(f"{path} is not a metric card of `adlm judge --out`")
    return card


def table_rows(card: Card) -> Iterator[CardRow]:
    """The rows of the card's table, with the reference's values where the reference was judged too."""
    reference_rows = {row.name: row for row in _metric_rows(card.get("reference_judged", {}))}
    for row in _metric_rows(card):
        reference = reference_rows.get(row.name)
        yield row if reference is None else row._replace(reference=reference.value)


def _metric_rows(metrics: Mapping[str, Any]) -> Iterator[CardRow]:
    if "perplexity" in metrics:
        perplexity = metrics["perplexity"]
        of = f"{perplexity['num_samples']:,} samples, {perplexity['num_tokens']:,} tokens"
        pooled, of_mean = (
            _format(perplexity[key]["value"], perplexity[key]["stderr"]) for key in ("pooled", "of_mean_nats")
        )
        yield CardRow("gen-PPL, pooled over tokens", pooled, of)
        yield CardRow("gen-PPL, samples weigh the same", of_mean, "exp of their mean nats")
        yield _mean_row("gen-PPL, mean of the samples'", perplexity["mean_of_perplexities"], "{:.4g}")
    if "mauve" in metrics:
        mauve = metrics["mauve"]
        sizes = f"{mauve['num_samples']:,} against {mauve['num_reference']:,} texts, {mauve['num_clusters']:,} clusters"
        yield CardRow("MAUVE", _format(mauve["value"], mauve["spread"], "{:.4f}"), sizes)
        seeds = f"smoothed; {len(mauve['by_seed'])} seeds, ± their spread"
        yield CardRow("MAUVE*", _format(mauve["star"], None, "{:.4f}"), seeds)
    if "entropy" in metrics:
        yield _mean_row("unigram entropy, nats", metrics["entropy"], "{:.4f}")
    if "diversity" in metrics:
        diversity = metrics["diversity"]
        for n, mean in diversity["distinct"].items():
            in_all = _format(diversity["distinct_in_all"][n], None, "{:.4f}")
            yield _mean_row(f"distinct-{n}", mean, "{:.4f}", f"{in_all} in all samples together")
        yield _mean_row("rep-4", diversity["repeated"], "{:.4f}", "share of tokens in repeated 4-grams")
        yield _mean_row("longest repeat, tokens", diversity["longest_repeat"], "{:.2f}")
        for unit in ("tokens", "characters"):
            lengths = diversity[unit]
            of = f"{lengths['least']:,} to {lengths['most']:,}, median {lengths['median']:,.6g}"
            yield _mean_row(f"length, {unit}", lengths["mean"], "{:.1f}", of)


def _mean_row(name: str, mean: Mapping[str, Any], form: str, of: str = "") -> CardRow:
    return CardRow(name, _format(mean["value"], mean["stderr"], form), of or f"{mean['num']:,} samples")


def _format(value: float | None, error: float | None, form: str = "{:.4g}") -> str:
    if value is None:
        return "none"
    return form.format(value) + ("" if error is None else f" ± {error:.2g}")
