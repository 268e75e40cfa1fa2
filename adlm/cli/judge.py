"""`adlm judge`: evaluate a samples file and write a metric card that records how each metric was measured."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console, Stages, write_error
from adlm.config.options import suggestion
from adlm.distributed import process_group
from adlm.errors import UserError, printable
from adlm.evaluation.generation.card import (
    Card,
    comparability_labels,
    make_output_folder,
    read_card,
    table_rows,
    write_card,
)
from adlm.evaluation.generation.card_plot import plot_cards
from adlm.evaluation.generation.generative_perplexity import EOS, START
from adlm.evaluation.generation.pipeline import make_card
from adlm.evaluation.generation.request import METRICS, CardRequest

EXAMPLE = """adlm judge samples.jsonl --reference prepared/owt --out cards/adlm-1024.json
  adlm judge samples.jsonl --model runs/judge --reference prepared/own --features minilm --out cards/own.json
  adlm judge samples.jsonl --metrics entropy,diversity
  adlm judge --plot cards/*.json --out cards.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "samples",
        nargs="*",
        metavar="SAMPLES",
        type=Path,
        help="a file written by `adlm sample --out`; with --plot, cards",
    )
    add(
        "--metrics",
        default=",".join(METRICS),
        metavar="LIST",
        help=f"comma-separated subset of {','.join(METRICS)} (default: all)",
    )
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the card; expensive intermediate results are cached next to it in judged/.\n"
        "with --plot, the plot file",
    )
    add("--force", action="store_true", help="replace a file that adlm did not write")
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto, a GPU if available)")
    add("--batch", type=int, metavar="B", help="texts per batch (default: 4, on a GPU 16); does not change the results")
    add("--json", action="store_true", help="print the card as one line of JSON")
    add("--plot", action="store_true", help="plot perplexity against entropy and MAUVE against steps for several cards")
    _reference_arguments(parser.add_argument_group("reference texts"))
    _judge_arguments(parser.add_argument_group("generative perplexity"))
    _mauve_arguments(parser.add_argument_group("MAUVE"))


def _reference_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--reference",
        metavar="DATA",
        type=Path,
        help="a prepared folder, a file with one text per line (.txt, .jsonl), or a samples file",
    )
    add("--split", metavar="NAME", help="split of a prepared folder (default: valid)")
    add("--field", default="text", metavar="NAME", help="field of a .jsonl file (default: text)")
    add("--num-reference", type=int, metavar="N", help="number of reference texts (default: as many as samples)")
    add("--reference-seed", type=int, default=0, metavar="S", help="seed that selects the reference texts (default: 0)")
    add("--judge-reference", action="store_true", help="also report perplexity, entropy and diversity of the reference")


def _judge_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--model",
        default="gpt2-large",
        metavar="JUDGE",
        help="Hugging Face name or folder, a .gguf file, or an AR or A2R model folder (default: gpt2-large)",
    )
    add(
        "--eos",
        choices=tuple(EOS),
        help=_format_choices(EOS, "closing for an adlm model, published for a Hugging Face model"),
    )
    add(
        "--start",
        choices=tuple(START),
        help=_format_choices(START, "bos for an adlm model, given for a Hugging Face model"),
    )
    add(
        "--ids",
        choices=("auto", "retokenised", "as-sampled"),
        default="auto",
        help="ids the judge reads: the text retokenised, as published, or the ids as\n"
        "sampled (default: auto, as-sampled for an adlm model with the same tokenizer)",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="truncate texts to N tokens (default: no truncation; published: the model's length)",
    )
    add("--context", type=int, metavar="N", help="maximum context window (default: the judge's)")


def _mauve_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--features",
        default="gpt2-large",
        metavar="NAME",
        help="Hugging Face name or folder, or minilm (default: gpt2-large)",
    )
    add(
        "--pooling",
        choices=("last", "mean"),
        help="pooling of the last layer: last token or mean (default: last; minilm: mean)",
    )
    add("--given-features", nargs=2, metavar=("SAMPLES.npy", "REFERENCE.npy"), type=Path, help="precomputed features")
    add("--seeds", type=int, default=5, metavar="N", help="number of clusterings, with seeds 25, 26, ... (default: 5)")
    add("--clusters", type=int, metavar="K", help="clusters per clustering (default: a tenth of the samples)")


def _format_choices(meanings: Mapping[Any, str], default: str) -> str:
    return "\n".join(f"{name}: {meaning}" for name, meaning in meanings.items()) + f"\n(default: {default})"


def run(arguments: argparse.Namespace) -> int:
    with process_group(write_error) as is_rank_zero:
        if not arguments.plot:
            _judge(arguments, is_rank_zero)
        elif is_rank_zero:
            _plot(arguments)
    return 0


def _judge(arguments: argparse.Namespace, is_rank_zero: bool) -> None:
    if len(arguments.samples) != 1:
        given = f"{len(arguments.samples)} are" if arguments.samples else "none is"
        raise UserError(f"adlm judge takes one samples file, and {given} given")
    request = _request(arguments)
    make_output_folder(arguments.out, arguments.force, _inputs(request))
    cache = None if arguments.out is None else arguments.out.parent / "judged"
    try:
        with Stages("texts", enabled=is_rank_zero) as stages:
            card = make_card(request, cache, stages.update)
    except KeyboardInterrupt:
        if is_rank_zero:
            saved = "progress is saved; rerun the same command to resume"
            write_error(f"adlm: interrupted; {saved if cache else 'no progress is saved without --out'}")
        raise
    if card is None:
        return
    if arguments.out is not None:
        write_card(card, arguments.out)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(card, allow_nan=False)}\n")
    else:
        _print_card(card, arguments.out)


def _request(arguments: argparse.Namespace) -> CardRequest:
    metrics = tuple(metric for metric in arguments.metrics.split(",") if metric)
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"--metrics: there is no metric {metric!r}{suggestion(metric, METRICS)}")
    if not metrics:
        raise UserError(f"--metrics is empty; give a subset of {','.join(METRICS)}")
    return CardRequest(
        samples=arguments.samples[0],
        metrics=metrics,
        reference=arguments.reference,
        split=arguments.split,
        field=arguments.field,
        num_reference=arguments.num_reference,
        reference_seed=arguments.reference_seed,
        judge_reference=arguments.judge_reference,
        model=arguments.model,
        eos=arguments.eos,
        start=arguments.start,
        ids=arguments.ids,
        max_tokens=arguments.max_tokens,
        context=arguments.context,
        features=arguments.features,
        pooling=arguments.pooling,
        given_features=None if arguments.given_features is None else tuple(arguments.given_features),
        num_seeds=arguments.seeds,
        clusters=arguments.clusters,
        batch=arguments.batch,
        device=arguments.device,
    )


def _inputs(request: CardRequest) -> list[Path]:
    """The files and folders that may be read; names on the Hugging Face hub are included and harmless."""
    names = (request.reference, request.model, request.features)
    return [request.samples, *(request.given_features or ()), *(Path(name) for name in names if name)]


def _plot(arguments: argparse.Namespace) -> None:
    if not arguments.samples:
        raise UserError("--plot needs at least one card, and none is given")
    if arguments.out is None:
        raise UserError("--plot needs --out FILE for the plot")
    plot_cards({str(path): read_card(path) for path in arguments.samples}, arguments.out, arguments.force)
    sys.stdout.write(f"{json.dumps(str(arguments.out)) if arguments.json else printable(str(arguments.out))}\n")


def _print_card(card: Card, out: Path | None) -> None:
    console = Console()
    reference_column = ["reference"] if "reference_judged" in card else []
    table = Table("", "samples", *reference_column, "", box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.no_wrap = True
    for row in table_rows(card):
        table.add_row(row.name, row.value, *([row.reference] if reference_column else []), Text(row.of, style="dim"))
    console.print(table)
    for label in comparability_labels(card):
        console.print(label, style="yellow", soft_wrap=True)
    for note in card["notes"]:
        console.print(note, style="dim", soft_wrap=True)
    if out is not None:
        console.print(f"card: {out}", soft_wrap=True)
