"""`adlm perplexity`: perplexity of models on texts, with standard errors, and differences between models."""

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
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="DATA",
        help="corpus names (adlm prepare --list), files, prepared folders, or zero-shot: the paper's seven corpora\n"
        f"({', '.join(ZERO_SHOT)})",
    )
    parser.add_argument(
        "--estimator",
        default=AUTO,
        metavar="NAME",
        help="auto: any-order where it is valid, else nelbo (default)\n"
        + "\n".join(f"{name}: {kind.line}" for name, kind in ESTIMATORS.items()).replace("%", "%%"),
    )
    parser.add_argument(
        "--samples", type=int, default=4, metavar="K", help="independent Monte Carlo replicates (default: 4)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="measure about N tokens, spread evenly over the text"
    )
    parser.add_argument(
        "--split", default="", metavar="S", help="train, valid or test (default: as published, else valid)"
    )
    parser.add_argument("--packing", default="", metavar="P", help="packed (nothing dropped) or packed-published")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer name, file or folder, for a model that has none")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the random draws, the same for every model (default: 0)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="rows per batch (default: 8,192 tokens); does not change the results"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the results as JSON; rerun the same command to resume"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that adlm did not write")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    with process_group(write_error) as is_rank_zero:
        device = local_device(arguments.device)
        settings = PerplexitySettings(
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
        with Stages("groups of rows", enabled=is_rank_zero) as stages:
            measured = measure_models(models, texts, settings, arguments.out, stages.update)
        if not is_rank_zero:
            return 0
        report = {
            "adlm": __version__,
            "figures": [asdict(line) for line in measured.lines],
            "differences": [asdict(gap) for gap in measured.gaps],
        }
        if arguments.out is not None:
            write_file(arguments.out, json.dumps(report, indent=1))
            for journal in measured.journals:
                delete_journal(journal)
        if arguments.json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            _print_results(measured.lines, measured.gaps)
    return 0


def _print_results(lines: list[PerplexityResult], gaps: list[Difference]) -> None:
    console = Console()
    columns = ("nats per token", "bits", "perplexity", "+- draws", "+- documents", "tokens", "units")
    table = Table("model", "text", *columns, box=None)
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps numbers and never truncates them
    for line in lines:
        table.add_row(
            Text(line.model),
            Text(f"{line.data} {line.split}"),
            f"{line.nats:.4f} exact" if line.exact else f"<= {line.nats:.4f}",
            f"{line.bits:.4f}",
            "too large" if line.perplexity is None else _format_number(line.perplexity),
            *(
                "unknown" if error is None or line.perplexity is None else _format_number(error * line.perplexity)
                for error in (line.monte_carlo_stderr, line.document_stderr)
            ),
            f"{line.tokens:,}",
            f"{line.documents:,} {line.unit}{'s' * (line.documents != 1)}",
        )
    console.print(table)
    for gap in gaps:
        stderrs = ((gap.monte_carlo_stderr, "draws"), (gap.document_stderr, "documents"))
        errors = ", ".join(f"+- {error:.2g} {source}" for error, source in stderrs if error is not None)
        console.print(
            f"{gap.model} minus {gap.against} on {gap.data}: {gap.nats:+.4f} nats per token "
            f"({errors or 'no standard error'})",
            soft_wrap=True,
        )
    for line_of_text in (*_format_settings(lines), "+- columns are standard errors of the perplexity"):
        console.print(line_of_text, style="dim", soft_wrap=True)
    for note in dict.fromkeys(note for line in lines for note in (f"{line.data}: {each}" for each in line.notes)):
        console.print(note, style="yellow", soft_wrap=True)


def _format_number(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.3e}"


def _format_settings(lines: list[PerplexityResult]) -> Iterator[str]:
    """The evaluation settings; where they differ between results, prefixed by the models and texts they apply to."""
    by_settings: dict[str, list[PerplexityResult]] = {}
    for line in lines:
        estimator = (
            "exact" if line.exact else f"estimator {line.estimator}, {line.samples} replicates, seed {line.seed}"
        )
        tokenizer = f"tokenizer {line.tokenizer} (sha256 {line.tokenizer_sha256[:8]})"
        settings = f"{estimator}; rows of {line.length:,} tokens, {line.packing}; {tokenizer}"
        by_settings.setdefault(settings, []).append(line)
    for settings, group in by_settings.items():
        yield settings if len(by_settings) == 1 else f"{', '.join(_format_models(group, lines))}: {settings}"


def _format_models(group: list[PerplexityResult], lines: list[PerplexityResult]) -> Iterator[str]:
    """The models of a group of results, each with its texts unless the group has all of the model's texts."""
    for model in dict.fromkeys(line.model for line in group):
        texts, all_texts = ([line.data for line in each if line.model == model] for each in (group, lines))
        yield model if texts == all_texts else f"{model} on {', '.join(texts)}"
