"""`adlm judge`: evaluate a samples file and write a metric card that records how each metric was measured."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from adlm.apps.judge.card import Card, read_card, table_rows, write_card
from adlm.apps.judge.inputs import JudgeSettings, read_inputs
from adlm.cli.console import Console, Stages
from adlm.cli.streams import write_error
from adlm.errors import UserError, printable
from adlm.files import check_output, reporting_os_errors
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
            write_card(card, request.out)
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
    cards = {str(path): read_card(path) for path in request.files}
    from adlm.apps.paper.results import card_points
    from adlm.apps.plots import check_plot_path, plot_cards

    check_plot_path(request.out, "--out", request.force, request.files)
    plot_cards(card_points(cards), request.out)
    sys.stdout.write(f"{json.dumps(str(request.out)) if request.json else printable(str(request.out))}\n")
    return 0


def _print_card(card: Card, out: Path | None) -> None:
    console = Console()
    reference_column = ["reference"] if "reference_judged" in card else []
    table = Table("", "samples", *reference_column, "", box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.no_wrap = True
    for row in table_rows(card):
        table.add_row(row.name, row.value, *([row.reference] if reference_column else []), Text(row.of, style="dim"))
    console.print(table)
    for metric in ("perplexity", "mauve"):
        if card.get(metric, {}).get("label"):
            console.print(card[metric]["label"], style="yellow", soft_wrap=True)
    for note in card["notes"]:
        console.print(note, style="dim", soft_wrap=True)
    if out is not None:
        console.print(f"card: {out}", soft_wrap=True)
