"""`adlm perplexity`: perplexity of models on texts, with standard errors, and differences between models."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from adlm import __version__
from adlm.cli.console import Console, Stages
from adlm.cli.streams import write_error
from adlm.config.load import ADAPTER, BOX, MODEL_NAMES
from adlm.config.schema import FormatName, PackingName
from adlm.data.prepare.prepared import is_prepared
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError
from adlm.files import check_output, write_file
from adlm.likelihood.settings import MEASURING, ZERO_SHOT, PerplexitySettings
from adlm.likelihood.text_sets import check_names
from adlm.request import narrow, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.apps.perplexity import Difference, PerplexityResult

WEIGHTS = tuple(f"{folder}{file}" for folder in ("", "model/") for file in ("model.safetensors", ADAPTER))


@dataclass(frozen=True)
class MeasurementRequest(PerplexitySettings):
    """How a model is measured: the options that `adlm perplexity` and `adlm reproduce` share."""

    packing: PackingName | None = option(
        "(default: that of the text; of the paper for zero-shot)", None, group=MEASURING
    )
    tokenizer: str | None = option("tokenizer name, file or folder, for a model that has none", None, group=MEASURING)
    device: str = option("auto, cuda or cpu (default: auto)", "auto", group=MEASURING)


@dataclass(frozen=True)
class PerplexityRequest(MeasurementRequest):
    """The options of `adlm perplexity`."""

    example = """adlm perplexity --data speech.txt --max-tokens 20000
  adlm perplexity runs/quickstart/adlm runs/quickstart/mdlm --data speech.txt
  adlm perplexity --data speech.txt --estimator order --order entropy --max-tokens 20000
  adlm perplexity model.ckpt --tokenizer gpt2 --data zero-shot --samples 8 --out zero-shot.json
  torchrun --nproc-per-node 8 -m adlm perplexity runs/own --data wikitext2 ptb --json"""

    models: tuple[str, ...] = option(
        "a model folder, run folder, owner/name on the hub, or .ckpt file (with --tokenizer)\n"
        "(default: box, the small model that comes with adlm)",
        (BOX,),
        positional=True,
    )
    data: tuple[str, ...] = option(
        "corpus names (adlm prepare --list), files, folders of texts, globs in quotes, prepared folders,\n"
        f"or zero-shot: the paper's seven corpora ({', '.join(ZERO_SHOT)})",
        metavar="DATA",
    )
    format: FormatName = option(
        "what files hold: text, or pairs of prompt and answer (docs/training.md), of which answers are measured\n"
        "(default: text; prepared folders know it)",
        "text",
    )
    split: str = option("train, valid or test (default: as published, else valid)", "")
    out: Path | None = option("write the results as JSON; rerun the same command to resume", None)
    force: bool = option("replace a file that adlm did not write", False)
    json: bool = option("print JSON", False)


def run(request: PerplexityRequest) -> int:
    for name in request.data:
        if name in MODEL_NAMES or any((Path(name) / file).is_file() for file in WEIGHTS):
            raise UserError(f"--data {name} is a model; write models before --data and texts after it")
    inputs = [Path(name) for name in (*request.models, *request.data, request.tokenizer) if name]
    check_output(request.out, force=request.force, inputs=inputs)
    check_names(request.data)
    from adlm.apps.perplexity import TextSelection, measure_models, with_tokenizer
    from adlm.distributed import local_device, process_group
    from adlm.language_model import load
    from adlm.likelihood.measurement import delete_journal

    with process_group(write_error) as is_rank_zero:
        device = local_device(request.device)
        models = {name: with_tokenizer(load(name, str(device)), request.tokenizer, name) for name in request.models}
        texts = TextSelection(request.data, request.packing or "", request.split, request.format)
        settings = narrow(request, PerplexitySettings)
        with Stages("tokens", enabled=is_rank_zero, limit="--max-tokens") as stages:
            measured = measure_models(models, texts, settings, request.out, stages.update)
        if not is_rank_zero:
            return 0
        report = {
            "adlm": __version__,
            "figures": [asdict(result) for result in measured.results],
            "differences": [asdict(each) for each in measured.differences],
        }
        if request.out is not None:
            write_file(request.out, json.dumps(report, indent=1))
            for journal in measured.journals:
                delete_journal(journal)
        if request.json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            _print_results(measured.results, measured.differences)
    return 0


def _print_results(results: list["PerplexityResult"], differences: list["Difference"]) -> None:
    console = Console()
    columns = ("nats per token", "bits", "perplexity", "+- Monte Carlo", "+- documents", "tokens", "documents")
    table = Table("model", "text", *columns, box=None)
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps numbers and never truncates them
    for result in results:
        is_divided = result.data in CORPORA or result.split != "train" or is_prepared(Path(result.data))
        table.add_row(
            Text(result.model),
            Text(f"{result.data} {result.split}" if is_divided else result.data),
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
    compared = {(each.against, each.data) for each in differences} | {(results[0].model, each.data) for each in results}
    for result in results:
        if (result.model, result.data) not in compared:
            console.print(
                f"{results[0].model} minus {result.model} on {result.data}: not paired, since their rows differ in "
                "length, packing or tokens",
                soft_wrap=True,
            )
    for line in (*_format_settings(results), "+- columns are standard errors of the perplexity"):
        console.print(line, style="dim", soft_wrap=True)
    for note in dict.fromkeys(f"{result.data}: {note}" for result in results for note in result.notes):
        console.print(note, style="yellow", soft_wrap=True)


def _format_number(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.3e}"


def _format_settings(results: list["PerplexityResult"]) -> Iterator[str]:
    """The evaluation settings; where they differ between results, prefixed by the models and texts they apply to."""
    by_settings: dict[str, list[PerplexityResult]] = {}
    for result in results:
        replicates = f"{result.samples} replicate{'s' * (result.samples != 1)}"
        path = f" in {result.order_steps:,} steps" if result.estimator == "path" else ""
        estimator = f"estimator {result.estimator}{path}, {replicates}, seed {result.seed}"
        rows = f"rows of {result.length:,} tokens, {result.packing}"
        tokenizer = f"tokenizer {result.tokenizer} (sha256 {result.tokenizer_sha256[:8]})"
        steps = "one token a step" if result.order_steps is None else f"{result.order_steps:,} steps"
        exact = "exact" if result.order is None else f"exact, order {result.order}, {steps}"
        settings = f"{exact if result.exact else estimator}; {rows}; {tokenizer}"
        by_settings.setdefault(settings, []).append(result)
    for settings, group in by_settings.items():
        yield settings if len(by_settings) == 1 else f"{', '.join(_format_models(group, results))}: {settings}"


def _format_models(group: list["PerplexityResult"], results: list["PerplexityResult"]) -> Iterator[str]:
    """The models of a group of results, each with its texts unless the group has all of the model's texts."""
    for model in dict.fromkeys(result.model for result in group):
        texts, all_texts = ([result.data for result in each if result.model == model] for each in (group, results))
        yield model if texts == all_texts else f"{model} on {', '.join(texts)}"
