"""`adlm quickstart`: show the model in the box, train two small models and compare them, in minutes on a CPU."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.cli.train import TrainReporter
from adlm.request import Request, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.apps.quickstart.report import BoxTexts, QuickstartReport


@dataclass(frozen=True)
class QuickstartRequest(Request):
    """The options of `adlm quickstart`."""

    example = """adlm quickstart --out runs/quickstart                       State of the Union speeches
  adlm quickstart data.path=book.txt --out runs/book           your own text"""

    overrides: tuple[str, ...] = option("option=value for both models, such as train.steps=2000", (), positional=True)
    out: Path = option("output folder", Path("runs/quickstart"), metavar="DIR")
    json: bool = option("print JSON", False)


def run(request: QuickstartRequest) -> int:
    from adlm.apps.quickstart.recipe import quickstart

    console = Console(stderr=True)

    def print_stage(message: str) -> None:
        console.print(message, style="bold")

    def print_box(box: "BoxTexts") -> None:
        if box.pretrained:
            print_stage("smollm2, a pretrained model that an adapter in this package makes a diffusion model")
            console.print(Panel.fit(Text(box.pretrained), title="sample", title_align="left", border_style="dim"))
        else:
            print_stage("for text with sense get the base weights of a larger model, smollm2, once: adlm fetch smollm2")
        print_stage("the model in the box, small and trained from nothing")
        console.print(Panel.fit(Text(box.sample), title="sample", title_align="left", border_style="dim"))
        console.print(_given_and_infilled(box.canvas, box.infilled))

    try:
        report = quickstart(list(request.overrides), request.out, print_box, print_stage, TrainReporter)
    except KeyboardInterrupt:
        sys.stderr.write("adlm: interrupted; progress is saved, rerun the same command to resume\n")
        raise
    if request.json:
        sys.stdout.write(f"{json.dumps(asdict(report))}\n")
    else:
        _print_report(Console(), report, request.out)
    return 0


def _print_report(console: Console, report: "QuickstartReport", out: Path) -> None:
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
    from adlm.canvas import HOLE

    blanks = HOLE.sub(lambda hole: "_" * int(hole[1]), canvas)
    return Text(f"given     {blanks}\ninfilled  {infilled}")
