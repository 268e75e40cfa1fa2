"""`adlm judge`: evaluate a samples file and write a metric card that records how each metric was measured."""

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from adlm.apps.judge.card import (
    Card,
    comparability_labels,
    make_output_folder,
    read_card,
    table_rows,
    write_card,
)
from adlm.apps.judge.pipeline import make_card
from adlm.apps.judge.request import METRICS, CardRequest
from adlm.apps.paper.results import card_points
from adlm.apps.plots import check_plot_path, plot_cards
from adlm.cli.console import Console, Stages
from adlm.cli.streams import write_error
from adlm.config.options import suggestion
from adlm.distributed import process_group
from adlm.errors import UserError, printable


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
        raise UserError(f"adlm judge takes one samples file, and {given} given; `adlm sample --out FILE` writes one")
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
    cards = {str(path): read_card(path) for path in arguments.samples}
    check_plot_path(arguments.out, "--out", arguments.force, arguments.samples)
    plot_cards(card_points(cards), arguments.out)
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
