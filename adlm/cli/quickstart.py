"""`adlm quickstart`: show the model in the box, train two small models and compare them, in minutes on a CPU."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from adlm.apps.quickstart.recipe import quickstart
from adlm.apps.quickstart.report import BoxTexts, QuickstartReport
from adlm.canvas import HOLE
from adlm.cli.console import Console
from adlm.cli.train import TrainReporter


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True)

    def print_stage(message: str) -> None:
        console.print(message, style="bold")

    def print_box(box: BoxTexts) -> None:
        print_stage(f"the model in the box, which needs no training ({box.seconds:.0f} s)")
        console.print(Panel.fit(Text(box.sample), title="sample", title_align="left", border_style="dim"))
        console.print(_given_and_infilled(box.canvas, box.infilled))

    try:
        report = quickstart(arguments.overrides, arguments.out, print_box, print_stage, TrainReporter)
    except KeyboardInterrupt:
        sys.stderr.write("adlm: interrupted; progress is saved, rerun the same command to resume\n")
        raise
    if arguments.json:
        sys.stdout.write(f"{json.dumps(asdict(report))}\n")
    else:
        _print_report(Console(), report, arguments.out)
    return 0


def _print_report(console: Console, report: QuickstartReport, out: Path) -> None:
    table = Table("", "bound, nats per token", "perplexity", "parameters", "training", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in (("ADLM", report.adlm), ("MDLM", report.mdlm)):
        bound = f"{row.nats:.4f} ± {row.stderr:.4f}"
        table.add_row(name, bound, f"{math.exp(row.nats):.1f}", f"{row.parameters:,}", f"{row.seconds:.0f} s")
    for name, nats in (("bigrams", report.bigram_nats), ("unigrams", report.unigram_nats)):
        table.add_row(name, f"{nats:.4f}         ", f"{math.exp(nats):.1f}", "", "", style="dim")
    console.print(table)
    console.print(report.verdict)
    for text in report.samples:
        console.print(Panel.fit(Text(text), title="ADLM sample", title_align="left", border_style="dim"))
    console.print(_given_and_infilled(report.canvas, report.infilled))
    console.print(f"{report.seconds:.0f} s in total; the models and report.html are in {out}")


def _given_and_infilled(canvas: str, infilled: str) -> Text:
    blanks = HOLE.sub(lambda hole: "_" * int(hole[1]), canvas)
    return Text(f"given     {blanks}\ninfilled  {infilled}")
