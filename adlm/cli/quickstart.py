"""`adlm quickstart`: a first run, whole, on any machine, in minutes."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.cli.train import TrainReporter
from adlm.quickstart.recipe import quickstart
from adlm.quickstart.report import QuickstartReport

EXAMPLE = """adlm quickstart --out runs/quickstart                       State of the Union speeches
  adlm quickstart data.path=book.txt --out runs/book           your own text"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="knob=value, for both models, such as train.steps=2000"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("runs/quickstart"), help="where it goes (runs/quickstart)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True)

    def say(sentence: str) -> None:
        console.print(sentence, style="bold")

    try:
        findings = quickstart(arguments.words, arguments.out, say, TrainReporter)
    except KeyboardInterrupt:
        sys.stderr.write("adlm: interrupted; what was done is kept, rerun the same command to resume\n")
        raise
    if arguments.json:
        sys.stdout.write(f"{json.dumps(asdict(findings))}\n")
    else:
        _tell(Console(), findings, arguments.out)
    return 0


def _tell(console: Console, findings: QuickstartReport, out: Path) -> None:
    table = Table("", "bound, nats a token", "perplexity", "parameters", "training", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in (("ADLM", findings.adlm), ("MDLM", findings.mdlm)):
        bound = f"{row.nats:.4f} ± {row.stderr:.4f}"
        table.add_row(name, bound, f"{math.exp(row.nats):.1f}", f"{row.parameters:,}", f"{row.seconds:.0f} s")
    for name, nats in (("bigrams", findings.bigram_nats), ("unigrams", findings.unigram_nats)):
        table.add_row(name, f"{nats:.4f}         ", f"{math.exp(nats):.1f}", "", "", style="dim")
    console.print(table)
    console.print(findings.verdict)
    for text in findings.samples:
        console.print(Panel.fit(Text(text), title="a sample of ADLM", title_align="left", border_style="dim"))
    console.print(Text(f"given     {findings.canvas}\ninfilled  {findings.infilled}"))
    console.print(f"{findings.seconds:.0f} s in all; models, curves and report.html are in {out}")
