"""`adlm judge`: how good a file of samples is, by the field's metrics, as a card that says how each was measured."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console, Stages, write_error
from adlm.config.knobs import suggestion
from adlm.distributed import process_group
from adlm.errors import UserError, printable
from adlm.evaluation.generation.card import Card, labels, make_output_folder, read_card, rows, write_card
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
    add("samples", nargs="*", metavar="SAMPLES", type=Path, help="a file of `adlm sample --out`; with --plot, cards")
    add("--metrics", default=",".join(METRICS), metavar="LIST", help=f"some of {','.join(METRICS)} (all)")
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the card; what took long is kept beside it, in judged/, and is not\n"
        "computed again. with --plot, the picture",
    )
    add("--force", action="store_true", help="replace a file that adlm did not write")
    add("--tokenizer", metavar="NAME", help="which wrote the samples, where the folder of their model is gone")
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (auto: a GPU if there is one)")
    add("--batch", type=int, metavar="B", help="texts side by side (4, on a GPU 16); no figure depends on it")
    add("--json", action="store_true", help="for machines: the card on one line")
    add("--plot", action="store_true", help="draw perplexity against entropy and MAUVE against steps, of several cards")
    _reference_arguments(parser.add_argument_group("the reference"))
    _judge_arguments(parser.add_argument_group("generative perplexity"))
    _mauve_arguments(parser.add_argument_group("MAUVE"))


def _reference_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--reference",
        metavar="DATA",
        type=Path,
        help="a prepared folder, a file with a text a line (.txt, .jsonl), or samples",
    )
    add("--split", metavar="NAME", help="of a prepared folder (valid)")
    add("--field", default="text", metavar="NAME", help="of a .jsonl (text)")
    add("--num-reference", type=int, metavar="N", help="texts of it (as many as samples)")
    add("--reference-seed", type=int, default=0, metavar="S", help="which of them are drawn (0)")
    add("--judge-reference", action="store_true", help="the reference's own perplexity, entropy and diversity too")


def _judge_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--model",
        default="gpt2-large",
        metavar="JUDGE",
        help="a Hugging Face name or folder, or an AR or A2R model of ours (gpt2-large)",
    )
    add("--eos", choices=tuple(EOS), help=_choices(EOS, "closing for a judge of ours, published for others"))
    add("--start", choices=tuple(START), help=_choices(START, "bos for a judge of ours, given for others"))
    add(
        "--ids",
        choices=("auto", "retokenised", "as-sampled"),
        default="auto",
        help="what the judge reads: its own ids of the text, as published, or the\n"
        "sampled ones (auto: those, where a judge of ours has the same tokenizer)",
    )
    add("--max-tokens", type=int, metavar="N", help="cut longer texts there (no cut; published: the model's length)")
    add("--context", type=int, metavar="N", help="read at most so many at once (the judge's own)")


def _mauve_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--features", default="gpt2-large", metavar="NAME", help="a Hugging Face name or folder, or minilm (gpt2-large)"
    )
    add(
        "--pooling",
        choices=("last", "mean"),
        help="of the last layer: at the last token, or the mean (last; minilm: mean)",
    )
    add(
        "--given-features", nargs=2, metavar=("SAMPLES.npy", "REFERENCE.npy"), type=Path, help="features made elsewhere"
    )
    add("--seeds", type=int, default=5, metavar="N", help="clusterings, with seeds 25, 26, ... (5)")
    add("--clusters", type=int, metavar="K", help="of each clustering (a tenth of the samples)")


def _choices(meanings: Mapping[Any, str], default: str) -> str:
    return "\n".join(f"{name}: {meaning}" for name, meaning in meanings.items()) + f" ({default})"


def run(arguments: argparse.Namespace) -> int:
    with process_group(write_error) as first:
        if not arguments.plot:
            _judge(arguments, first)
        elif first:
            _plot(arguments)
    return 0


def _judge(arguments: argparse.Namespace, first: bool) -> None:
    if len(arguments.samples) != 1:
        given = f"{len(arguments.samples)} are" if arguments.samples else "none is"
        raise UserError(f"one file of samples is judged at a time, and {given} given")
    asked = _asked(arguments)
    make_output_folder(arguments.out, arguments.force, _read(asked))
    keep_in = None if arguments.out is None else arguments.out.parent / "judged"
    try:
        with Stages("texts", shown=first) as stages:
            card = make_card(asked, keep_in, stages.tell)
    except KeyboardInterrupt:
        if first:
            kept = "what was done is kept; run the same command again to go on"
            write_error(f"adlm: interrupted; {kept if keep_in else 'nothing is kept without --out'}")
        raise
    if card is None:
        return
    if arguments.out is not None:
        write_card(card, arguments.out)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(card, allow_nan=False)}\n")
    else:
        _tell(card, arguments.out)


def _asked(arguments: argparse.Namespace) -> CardRequest:
    metrics = tuple(metric for metric in arguments.metrics.split(",") if metric)
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"--metrics: there is no metric {metric!r}{suggestion(metric, METRICS)}")
    if not metrics:
        raise UserError(f"--metrics names none; give some of {','.join(METRICS)}")
    return CardRequest(
        samples=arguments.samples[0],
        metrics=metrics,
        tokenizer=arguments.tokenizer,
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
        longest=arguments.max_tokens,
        context=arguments.context,
        features=arguments.features,
        pooling=arguments.pooling,
        given=None if arguments.given_features is None else tuple(arguments.given_features),
        num_seeds=arguments.seeds,
        clusters=arguments.clusters,
        batch=arguments.batch,
        device=arguments.device,
    )


def _read(asked: CardRequest) -> list[Path]:
    """The files and folders that are read, where they are no names of the hub."""
    names = (asked.tokenizer, asked.reference, asked.model, asked.features)
    return [asked.samples, *(asked.given or ()), *(Path(name) for name in names if name)]


def _plot(arguments: argparse.Namespace) -> None:
    if not arguments.samples:
        raise UserError("--plot draws cards, and none is given")
    if arguments.out is None:
        raise UserError("--plot: --out is not given; say where the picture goes")
    plot_cards({str(path): read_card(path) for path in arguments.samples}, arguments.out, arguments.force)
    sys.stdout.write(f"{json.dumps(str(arguments.out)) if arguments.json else printable(str(arguments.out))}\n")


def _tell(card: Card, out: Path | None) -> None:
    console = Console()
    beside = ["reference"] if "reference_judged" in card else []
    table = Table("", "samples", *beside, "", box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.no_wrap = True
    for row in rows(card):
        table.add_row(row.name, row.value, *([row.reference] if beside else []), Text(row.of, style="dim"))
    console.print(table)
    for label in labels(card):
        console.print(label, style="yellow", soft_wrap=True)
    for note in card["notes"]:
        console.print(note, style="dim", soft_wrap=True)
    if out is not None:
        console.print(f"card: {out}", soft_wrap=True)
