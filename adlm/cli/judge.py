"""`adlm judge`: evaluate a samples file and write a metric card that records how each metric was measured."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from adlm.apps.judge.inputs import JudgeSettings, read_inputs
from adlm.apps.paper.results import card_points, kind_of
from adlm.cli.console import Console, Stages
from adlm.cli.streams import write_error
from adlm.errors import UserError, printable
from adlm.files import check_output, parse_json, read_bytes, reporting_os_errors, write_file
from adlm.request import option


@dataclass(frozen=True)
class JudgeRequest(JudgeSettings):
    """The options of `adlm judge`."""

    example = """adlm judge samples.jsonl --reference prepared/owt --out cards/adlm-1024.json
  adlm judge samples.jsonl --model runs/judge --reference prepared/own --features minilm --out cards/own.json
  adlm judge samples.jsonl --metrics entropy,diversity
  adlm judge --plot cards/*.json --out cards.png"""

    files: tuple[Path, ...] = option(
        "a file written by `adlm sample --out`; with --plot, cards", (), positional=True, metavar="SAMPLES"
    )
    out: Path | None = option(
        "write the card; expensive intermediate results are cached next to it in judged/.\nwith --plot, the plot file",
        None,
    )
    force: bool = option("replace a file that adlm did not write", False)
    json: bool = option("print the card as one line of JSON", False)
    plot: bool = option("plot perplexity against entropy and MAUVE against steps for several cards", False)


def run(request: JudgeRequest) -> int:
    if request.plot:
        return _plot(request) if os.environ.get("RANK", "0") == "0" else 0
    if len(request.files) != 1:
        given = f"{len(request.files)} are" if request.files else "none is"
        raise UserError(f"adlm judge takes one samples file, and {given} given; `adlm sample --out FILE` writes one")
    names = (request.reference, request.model, request.features)  # names on the Hugging Face hub are harmless
    read = [*request.files, *(request.given_features or ()), *(Path(name) for name in names if name)]
    if request.out is not None:
        with reporting_os_errors(request.out, f"--out {request.out} cannot be written"):
            request.out.parent.mkdir(parents=True, exist_ok=True)
    check_output(request.out, force=request.force, inputs=read)
    inputs = read_inputs(request.files[0], request)
    from adlm.apps.judge.pipeline import make_card
    from adlm.distributed import process_group

    cache = None if request.out is None else request.out.parent / "judged"
    with process_group(write_error) as is_rank_zero:
        try:
            with Stages("texts", enabled=is_rank_zero) as stages:
                card = make_card(inputs, cache, stages.update)
        except KeyboardInterrupt:
            if is_rank_zero:
                saved = "progress is saved; rerun the same command to resume"
                write_error(f"adlm: interrupted; {saved if cache else 'no progress is saved without --out'}")
            raise
        if card is None:
            return 0
        if request.out is not None:
            write_file(request.out, json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        if request.json:
            sys.stdout.write(f"{json.dumps(card, allow_nan=False)}\n")
        else:
            _print_card(card, request.out)
    return 0


def _plot(request: JudgeRequest) -> int:
    if not request.files:
        raise UserError("--plot needs at least one card, and none is given")
    if request.out is None:
        raise UserError("--plot needs --out FILE for the plot")
    cards = {str(path): _read_card(path) for path in request.files}
    from adlm.apps.plots import check_plot_path, plot_cards

    check_plot_path(request.out, "--out", request.force, request.files)
    plot_cards(card_points(cards), request.out)
    sys.stdout.write(f"{json.dumps(str(request.out)) if request.json else printable(str(request.out))}\n")
    return 0


def _read_card(path: Path) -> Any:
    content, card = read_bytes(path), None
    with suppress(ValueError):  # it is not JSON
        card = parse_json(content)
    if kind_of(card) != "card":
        raise UserError(f"{path} is not a metric card of `adlm judge --out`")
    return card


def _print_card(card: Mapping[str, Any], out: Path | None) -> None:
    console = Console()
    has_reference = "reference_judged" in card
    reference = {name: value for name, value, _ in _metric_rows(card.get("reference_judged", {}))}
    table = Table("", "samples", *["reference"] * has_reference, "", box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.no_wrap = True
    for name, value, of in _metric_rows(card):
        table.add_row(name, value, *[reference.get(name, "")] * has_reference, Text(of, style="dim"))
    console.print(table)
    for metric in ("perplexity", "mauve"):
        if card.get(metric, {}).get("label"):
            console.print(card[metric]["label"], style="yellow", soft_wrap=True)
    for note in card["notes"]:
        console.print(note, style="dim", soft_wrap=True)
    if out is not None:
        console.print(f"card: {out}", soft_wrap=True)


def _metric_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, value with its standard error, and what it is of, for each row of the table of a card."""
    if "perplexity" in metrics:
        perplexity = metrics["perplexity"]
        of = f"{perplexity['num_samples']:,} samples, {perplexity['num_tokens']:,} tokens"
        pooled, of_mean = (
            _format(perplexity[key]["value"], perplexity[key]["stderr"]) for key in ("pooled", "of_mean_nats")
        )
        yield ("gen-PPL, pooled over tokens", pooled, of)
        yield ("gen-PPL, samples weigh the same", of_mean, "exp of their mean nats")
        yield _mean_row("gen-PPL, mean of the samples'", perplexity["mean_of_perplexities"], "{:.4g}")
    if "mauve" in metrics:
        mauve = metrics["mauve"]
        sizes = f"{mauve['num_samples']:,} against {mauve['num_reference']:,} texts, {mauve['num_clusters']:,} clusters"
        yield ("MAUVE", _format(mauve["value"], mauve["spread"], "{:.4f}"), sizes)
        seeds = f"smoothed; {len(mauve['by_seed'])} seeds, ± their spread"
        yield ("MAUVE*", _format(mauve["star"], None, "{:.4f}"), seeds)
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


def _mean_row(name: str, mean: Mapping[str, Any], form: str, of: str = "") -> tuple[str, str, str]:
    return name, _format(mean["value"], mean["stderr"], form), of or f"{mean['num']:,} samples"


def _format(value: float | None, error: float | None, form: str = "{:.4g}") -> str:
    if value is None:
        return "none"
    return form.format(value) + ("" if error is None else f" ± {error:.2g}")
