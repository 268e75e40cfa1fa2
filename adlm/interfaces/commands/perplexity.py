"""`adlm perplexity`: what texts cost a model, with error bars, and what one model costs less than another."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adlm import __version__
from adlm.evaluation.estimators import ESTIMATORS
from adlm.evaluation.perplexity import Recipe
from adlm.evaluation.text_sets import ZERO_SHOT
from adlm.interfaces.measuring import Gap, Line, Texts, check_place, measured, own_device, processes, with_tokenizer
from adlm.language_model import load
from adlm.places import write_whole

EXAMPLE = """adlm perplexity runs/quickstart/adlm runs/quickstart/mdlm --data speech.txt
  adlm perplexity model.ckpt --data zero-shot --samples 8 --out zero-shot.json
  torchrun --nproc-per-node 8 -m adlm.interfaces.cli perplexity runs/own --data wikitext2 ptb --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folders, run folders or .ckpt files")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="DATA",
        help="names (adlm prepare --list), files, prepared folders, or zero-shot: the paper's seven\n"
        f"({', '.join(ZERO_SHOT)})",
    )
    parser.add_argument(
        "--estimator",
        default="nelbo",
        metavar="NAME",
        help="\n".join(f"{name}: {kind.line}" for name, kind in ESTIMATORS.items()).replace("%", "%%"),
    )
    parser.add_argument("--samples", type=int, default=4, metavar="K", help="independent replicates of the draws (4)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="measure about so many, from all over the text")
    parser.add_argument("--split", default="", metavar="S", help="train, valid or test (as published, or valid)")
    parser.add_argument("--packing", default="", metavar="P", help="packed (nothing dropped) or packed-published")
    parser.add_argument("--tokenizer", metavar="T", help="for a model that has none: a name, a file or a folder")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same draws for every model (0)")
    parser.add_argument("--batch", type=int, metavar="B", help="rows read at once (8, on a GPU 32); changes no figure")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda or cpu")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the figures as JSON; interrupted, it goes on")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    with processes() as first:
        device = own_device(arguments.device)
        recipe = Recipe(
            arguments.estimator,
            arguments.samples,
            arguments.seed,
            (32 if device.type == "cuda" else 8) if arguments.batch is None else arguments.batch,
            arguments.max_tokens,
        )
        check_place(arguments.out)
        models = {name: with_tokenizer(load(name, str(device)), arguments.tokenizer, name) for name in arguments.models}
        texts = Texts(tuple(arguments.data), arguments.packing, arguments.split)
        found = measured(models, texts, recipe, arguments.out, first)
        lines, gaps = found.lines, found.gaps
        if not first:
            return 0
        figures, differences = ([asdict(each) for each in some] for some in (lines, gaps))
        told = {"adlm": __version__, "figures": figures, "differences": differences}
        if arguments.out is not None:
            write_whole(arguments.out, json.dumps(told, indent=1))
            found.forget()
        if arguments.json:
            sys.stdout.write(json.dumps(told) + "\n")
        else:
            _show(lines, gaps)
    return 0


def _show(lines: list[Line], gaps: list[Gap]) -> None:
    console = Console()
    table = Table("model", "text", "nats a token", "bits", "perplexity", "+- draws", "+- documents", "tokens", box=None)
    for line in lines:
        table.add_row(
            Text(line.model),
            Text(f"{line.data} {line.split}"),
            f"{line.nats:.4f}" + (" exact" if line.exact else ""),
            f"{line.bits:.4f}",
            "too large" if line.perplexity is None else f"{line.perplexity:.3f}",
            *(
                "unknown" if error is None or line.perplexity is None else f"{error * line.perplexity:.3f}"
                for error in (line.monte_carlo_stderr, line.document_stderr)
            ),
            f"{line.tokens:,}",
        )
    console.print(table)
    for gap in gaps:
        both = ((gap.monte_carlo_stderr, "draws"), (gap.document_stderr, "documents"))
        errors = ", ".join(f"+- {error:.4f} {of}" for error, of in both if error is not None)
        console.print(
            f"{gap.model} minus {gap.against} on {gap.data}: {gap.nats:+.4f} nats a token ({errors})", markup=False
        )
    first = lines[0]
    console.print(
        f"estimator {first.estimator}, {first.samples} replicates, seed {first.seed}; rows of {first.length} tokens, "
        f"{first.packing}; {first.documents:,} documents; tokenizer {first.tokenizer}; errors of the perplexity, one "
        "standard error each",
        style="dim",
        highlight=False,
    )
    for note in dict.fromkeys(note for line in lines for note in (f"{line.data}: {each}" for each in line.notes)):
        console.print(note, style="yellow", highlight=False)
