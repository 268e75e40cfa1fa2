"""`adlm perplexity`: what texts cost a model, with error bars, and what one model costs less than another."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from adlm import __version__
from adlm.cli.console import Console, Stages, write_error
from adlm.distributed import local_device, process_group
from adlm.evaluation.model_perplexity import Difference, PerplexityResult, TextSelection, measure_models, with_tokenizer
from adlm.files import check_output, write_file
from adlm.language_model import load
from adlm.likelihood.estimators import ESTIMATORS
from adlm.likelihood.perplexity import AUTO, PerplexitySettings, delete_journal
from adlm.likelihood.text_sets import ZERO_SHOT

EXAMPLE = """adlm perplexity runs/quickstart/adlm runs/quickstart/mdlm --data speech.txt
  adlm perplexity model.ckpt --data zero-shot --samples 8 --out zero-shot.json
  torchrun --nproc-per-node 8 -m adlm perplexity runs/own --data wikitext2 ptb --json"""


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
        default=AUTO,
        metavar="NAME",
        help="auto: any-order where it is valid, else nelbo (the default)\n"
        + "\n".join(f"{name}: {kind.line}" for name, kind in ESTIMATORS.items()).replace("%", "%%"),
    )
    parser.add_argument("--samples", type=int, default=4, metavar="K", help="independent replicates of the draws (4)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="measure about so many, from all over the text")
    parser.add_argument("--split", default="", metavar="S", help="train, valid or test (as published, or valid)")
    parser.add_argument("--packing", default="", metavar="P", help="packed (nothing dropped) or packed-published")
    parser.add_argument("--tokenizer", metavar="T", help="for a model that has none: a name, a file or a folder")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same draws for every model (0)")
    parser.add_argument(
        "--batch", type=int, metavar="B", help="rows read at once (of 8,192 tokens in all); changes no figure"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda or cpu")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the figures as JSON; interrupted, it goes on")
    parser.add_argument("--force", action="store_true", help="replace a file that adlm did not write")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    with process_group(write_error) as first:
        device = local_device(arguments.device)
        recipe = PerplexitySettings(
            arguments.estimator,
            arguments.samples,
            arguments.seed,
            arguments.batch,
            arguments.max_tokens,
        )
        inputs = [*arguments.models, *arguments.data, *([arguments.tokenizer] * (arguments.tokenizer is not None))]
        check_output(arguments.out, force=arguments.force, inputs=map(Path, inputs))
        models = {name: with_tokenizer(load(name, str(device)), arguments.tokenizer, name) for name in arguments.models}
        texts = TextSelection(tuple(arguments.data), arguments.packing, arguments.split)
        with Stages("groups of rows", shown=first) as stages:
            found = measure_models(models, texts, recipe, arguments.out, stages.tell)
        lines, gaps = found.lines, found.gaps
        if not first:
            return 0
        figures, differences = ([asdict(each) for each in some] for some in (lines, gaps))
        told = {"adlm": __version__, "figures": figures, "differences": differences}
        if arguments.out is not None:
            write_file(arguments.out, json.dumps(told, indent=1))
            for journal in found.journals:
                delete_journal(journal)
        if arguments.json:
            sys.stdout.write(json.dumps(told) + "\n")
        else:
            _show(lines, gaps)
    return 0


def _show(lines: list[PerplexityResult], gaps: list[Difference]) -> None:
    console = Console()
    columns = ("nats per token", "bits", "perplexity", "+- draws", "+- documents", "tokens", "units")
    table = Table("model", "text", *columns, box=None)
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal breaks a figure and cuts none
    for line in lines:
        table.add_row(
            Text(line.model),
            Text(f"{line.data} {line.split}"),
            f"{line.nats:.4f} exact" if line.exact else f"<= {line.nats:.4f}",
            f"{line.bits:.4f}",
            "too large" if line.perplexity is None else _number(line.perplexity),
            *(
                "unknown" if error is None or line.perplexity is None else _number(error * line.perplexity)
                for error in (line.monte_carlo_stderr, line.document_stderr)
            ),
            f"{line.tokens:,}",
            f"{line.documents:,} {line.unit}{'s' * (line.documents != 1)}",
        )
    console.print(table)
    for gap in gaps:
        both = ((gap.monte_carlo_stderr, "draws"), (gap.document_stderr, "documents"))
        errors = ", ".join(f"+- {error:.2g} {of}" for error, of in both if error is not None) or "no error is known"
        console.print(
            f"{gap.model} minus {gap.against} on {gap.data}: {gap.nats:+.4f} nats a token ({errors})",
            soft_wrap=True,
        )
    for sentence in (*_recipes(lines), "errors are of the perplexity, one standard error each"):
        console.print(sentence, style="dim", soft_wrap=True)
    for note in dict.fromkeys(note for line in lines for note in (f"{line.data}: {each}" for each in line.notes)):
        console.print(note, style="yellow", soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.3e}"


def _recipes(lines: list[PerplexityResult]) -> Iterator[str]:
    """How the figures were made; where that is not the same for all, whose each is."""
    found: dict[str, list[PerplexityResult]] = {}
    for line in lines:
        how = "exact" if line.exact else f"estimator {line.estimator}, {line.samples} replicates, seed {line.seed}"
        tokenizer = f"tokenizer {line.tokenizer} (sha256 {line.tokenizer_sha256[:8]})"
        recipe = f"{how}; rows of {line.length:,} tokens, {line.packing}; {tokenizer}"
        found.setdefault(recipe, []).append(line)
    for recipe, its in found.items():
        yield recipe if len(found) == 1 else f"{', '.join(_whose(its, lines))}: {recipe}"


def _whose(some: list[PerplexityResult], lines: list[PerplexityResult]) -> Iterator[str]:
    """The models of these lines, each with its texts where they are not all of them."""
    for model in dict.fromkeys(line.model for line in some):
        texts, every = ([line.data for line in each if line.model == model] for each in (some, lines))
        yield model if texts == every else f"{model} on {', '.join(texts)}"
