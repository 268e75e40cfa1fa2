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
from adlm.apps.perplexity import Difference, PerplexityResult, TextSelection, measure_models, with_tokenizer
from adlm.checkpoints.model_folder import WEIGHTS
from adlm.cli.console import Console, Stages
from adlm.cli.streams import write_error
from adlm.config.load import BOX
from adlm.distributed import local_device, process_group
from adlm.errors import UserError
from adlm.files import check_output, write_file
from adlm.language_model import load
from adlm.likelihood.perplexity import PerplexitySettings, delete_journal


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
        for name in arguments.data:
            if name == BOX or any((Path(name) / file).is_file() for file in (WEIGHTS, f"model/{WEIGHTS}")):
                raise UserError(f"--data {name} is a model; write models before --data and texts after it")
        inputs = [*arguments.models, *arguments.data, *([arguments.tokenizer] * (arguments.tokenizer is not None))]
        check_output(arguments.out, force=arguments.force, inputs=map(Path, inputs))
        models = {name: with_tokenizer(load(name, str(device)), arguments.tokenizer, name) for name in arguments.models}
        texts = TextSelection(tuple(arguments.data), arguments.packing, arguments.split)
        with Stages("tokens", enabled=is_rank_zero, limit="--max-tokens") as stages:
            measured = measure_models(models, texts, settings, arguments.out, stages.update)
        if not is_rank_zero:
            return 0
        report = {
            "adlm": __version__,
            "figures": [asdict(result) for result in measured.results],
            "differences": [asdict(each) for each in measured.differences],
        }
        if arguments.out is not None:
            write_file(arguments.out, json.dumps(report, indent=1))
            for journal in measured.journals:
                delete_journal(journal)
        if arguments.json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            _print_results(measured.results, measured.differences)
    return 0


def _print_results(results: list[PerplexityResult], differences: list[Difference]) -> None:
    console = Console()
    columns = ("nats per token", "bits", "perplexity", "+- Monte Carlo", "+- documents", "tokens", "documents")
    table = Table("model", "text", *columns, box=None)
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps numbers and never truncates them
    for result in results:
        has_splits = not Path(result.data).is_file()
        table.add_row(
            Text(result.model),
            Text(f"{result.data} {result.split}" if has_splits else result.data),
            f"{result.nats:.4f} exact" if result.exact else f"<= {result.nats:.4f}",
            f"{result.bits:.4f}",
            "too large" if result.perplexity is None else _format_number(result.perplexity),
            *(
                "unknown" if error is None or result.perplexity is None else _format_number(error * result.perplexity)
                for error in (result.monte_carlo_stderr, result.document_stderr)
            ),
            f"{result.tokens:,}",
            f"{result.documents:,} {result.unit}{'s' * (result.documents != 1)}",
        )
    console.print(table)
    for each in differences:
        stderrs = ((each.monte_carlo_stderr, "Monte Carlo"), (each.document_stderr, "documents"))
        errors = ", ".join(f"+- {error:.2g} {source}" for error, source in stderrs if error is not None)
        console.print(
            f"{each.model} minus {each.against} on {each.data}: {each.nats:+.4f} nats per token "
            f"({errors or 'no standard error'})",
            soft_wrap=True,
        )
    for line in (*_format_settings(results), "+- columns are standard errors of the perplexity"):
        console.print(line, style="dim", soft_wrap=True)
    for note in dict.fromkeys(f"{result.data}: {note}" for result in results for note in result.notes):
        console.print(note, style="yellow", soft_wrap=True)


def _format_number(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.3e}"


def _format_settings(results: list[PerplexityResult]) -> Iterator[str]:
    """The evaluation settings; where they differ between results, prefixed by the models and texts they apply to."""
    by_settings: dict[str, list[PerplexityResult]] = {}
    for result in results:
        replicates = f"{result.samples} replicate{'s' * (result.samples != 1)}"
        estimator = f"estimator {result.estimator}, {replicates}, seed {result.seed}"
        rows = f"rows of {result.length:,} tokens, {result.packing}"
        tokenizer = f"tokenizer {result.tokenizer} (sha256 {result.tokenizer_sha256[:8]})"
        settings = f"{'exact' if result.exact else estimator}; {rows}; {tokenizer}"
        by_settings.setdefault(settings, []).append(result)
    for settings, group in by_settings.items():
        yield settings if len(by_settings) == 1 else f"{', '.join(_format_models(group, results))}: {settings}"


def _format_models(group: list[PerplexityResult], results: list[PerplexityResult]) -> Iterator[str]:
    """The models of a group of results, each with its texts unless the group has all of the model's texts."""
    for model in dict.fromkeys(result.model for result in group):
        texts, all_texts = ([result.data for result in each if result.model == model] for each in (group, results))
        yield model if texts == all_texts else f"{model} on {', '.join(texts)}"
