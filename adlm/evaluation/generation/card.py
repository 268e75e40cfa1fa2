"""A metric card: figures, every choice behind them, and what they may be set beside. Knows no models.

A card is JSON. Figures of another judge or featuriser than GPT-2 large, or by another protocol than the published one,
carry a sentence that says so, in the card, in its table and in every picture.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from adlm import __version__
from adlm.errors import UserError
from adlm.evaluation.generation.mauve import ENOUGH_TEXTS, PUBLISHED_LONGEST
from adlm.files import check_output, parse_json, read_bytes, write_file, writing

FORMAT = 1
GPT2_LARGE = ("gpt2-large", "openai-community/gpt2-large")
PACKAGES = ("torch", "numpy", "transformers", "mauve-text", "faiss-cpu", "scikit-learn")

Card = dict[str, Any]


class CardRow(NamedTuple):
    """A figure for a reader."""

    name: str
    value: str
    """With its error."""
    of: str
    reference: str = ""


def versions() -> dict[str, str | None]:
    """What computed it; None where a package is not installed."""
    found: dict[str, str | None] = {"adlm": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def perplexity_label(perplexity: Mapping[str, Any]) -> str | None:
    """What keeps this perplexity from standing beside published ones; None where nothing does."""
    others = []
    if perplexity["judge"]["name"] not in GPT2_LARGE:
        others.append(f"the judge is {perplexity['judge']['name']}, not GPT-2 large")
    for choice, published in (("eos", "published"), ("start", "given"), ("ids", "retokenised")):
        if perplexity[choice] != published:
            others.append(f"{choice} {perplexity[choice]}, not {published}")
    if not others:
        return None
    return f"not to be set beside published perplexities: {'; '.join(others)}"


def mauve_label(mauve: Mapping[str, Any]) -> str | None:
    """What keeps this MAUVE from standing beside published ones; None where nothing does."""
    others, featuriser = [], mauve["featuriser"]
    if featuriser["name"] not in GPT2_LARGE:
        others.append(f"the features are of {featuriser['name']}, not GPT-2 large")
    elif (featuriser["pooling"], featuriser["longest"]) != ("last", PUBLISHED_LONGEST):
        others.append(
            f"pooling {featuriser['pooling']} of {featuriser['longest']} tokens, not last of {PUBLISHED_LONGEST}"
        )
    if min(mauve["num_samples"], mauve["num_reference"]) < ENOUGH_TEXTS:
        others.append(f"of fewer than {ENOUGH_TEXTS:,} texts, where it says more of their number than of them")
    if not others:
        return None
    return f"not to be set beside published MAUVE: {'; '.join(others)}"


def labels(card: Card) -> list[str]:
    return [card[metric]["label"] for metric in ("perplexity", "mauve") if metric in card and card[metric]["label"]]


def notes(card: Card) -> Iterator[str]:
    """What someone may not have expected."""
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
    if samples["tokenizer"] is None:
        yield "which tokenizer wrote the samples is not known, so texts are read anew; --tokenizer names it"
    reference = card.get("reference", {})
    if reference.get("tokenizer_of_samples") is False:
        rows = f", and its rows are {reference['row_length']} tokens of its own" if "row_length" in reference else ""
        yield f"the reference's tokenizer is not the samples', so its entropy and diversity are not told{rows}"


def make_output_folder(path: Path | None, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """A folder for the card, before anything is computed for it."""
    if path is None:
        return
    with writing(path, f"--out {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path, force=force, inputs=inputs)


def write_card(card: Card, path: Path) -> None:
    write_file(path, json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_card(path: Path) -> Card:
    try:
        card = parse_json(read_bytes(path))
    except UserError:
        raise
    except ValueError:
        card = None
    if not isinstance(card, dict) or card.get("card") != FORMAT:
        raise UserError(f"{path} is no metric card of `adlm judge`")
    return card


def rows(card: Card) -> Iterator[CardRow]:
    """The figures in the order they are told, the reference's beside them where it was judged."""
    theirs = {row.name: row for row in _rows(card.get("reference_judged", {}))}
    for row in _rows(card):
        beside = theirs.get(row.name)
        yield row if beside is None else row._replace(reference=beside.value)


def _rows(figures: Mapping[str, Any]) -> Iterator[CardRow]:
    if "perplexity" in figures:
        yield from _perplexity_rows(figures["perplexity"])
    if "mauve" in figures:
        yield from _mauve_rows(figures["mauve"])
    if "entropy" in figures:
        yield _mean_row("unigram entropy, nats", figures["entropy"], "{:.4f}")
    if "diversity" in figures:
        yield from _diversity_rows(figures["diversity"])


def _perplexity_rows(found: Mapping[str, Any]) -> Iterator[CardRow]:
    of = f"{found['num_samples']:,} samples, {found['num_tokens']:,} tokens"
    pooled, each = found["pooled"], found["of_mean_nats"]
    yield CardRow("gen-PPL, pooled over tokens", _number(pooled["value"], pooled["stderr"]), of)
    yield CardRow("gen-PPL, samples weigh the same", _number(each["value"], each["stderr"]), "exp of their mean nats")
    yield _mean_row("gen-PPL, mean of the samples'", found["mean_of_perplexities"], "{:.4g}")


def _mauve_rows(found: Mapping[str, Any]) -> Iterator[CardRow]:
    sizes = f"{found['num_samples']:,} against {found['num_reference']:,} texts, {found['num_clusters']:,} clusters"
    yield CardRow("MAUVE", _number(found["value"], found["spread"], "{:.4f}"), sizes)
    yield CardRow(
        "MAUVE*", _number(found["star"], None, "{:.4f}"), f"smoothed; {len(found['by_seed'])} seeds, ± their spread"
    )


def _diversity_rows(found: Mapping[str, Any]) -> Iterator[CardRow]:
    for n, mean in found["distinct"].items():
        together = _number(found["distinct_in_all"][n], None, "{:.4f}")
        yield _mean_row(f"distinct-{n}", mean, "{:.4f}")._replace(of=f"{together} in all samples together")
    yield _mean_row("rep-4", found["repeated"], "{:.4f}")._replace(of="share of tokens in repeated 4-grams")
    yield _mean_row("longest repeat, tokens", found["longest_repeat"], "{:.2f}")
    for what in ("tokens", "characters"):
        sizes = found[what]
        of = f"{sizes['least']:,} to {sizes['most']:,}, median {sizes['median']:,.6g}"
        yield _mean_row(f"length, {what}", sizes["mean"], "{:.1f}")._replace(of=of)


def _mean_row(name: str, mean: Mapping[str, Any], form: str) -> CardRow:
    return CardRow(name, _number(mean["value"], mean["stderr"], form), f"{mean['num']:,} samples")


def _number(value: float | None, error: float | None, form: str = "{:.4g}") -> str:
    if value is None:
        return "none"
    return form.format(value) + ("" if error is None else f" ± {error:.2g}")
