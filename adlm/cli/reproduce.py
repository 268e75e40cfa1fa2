"""`adlm reproduce`: compare models with a table of the paper: differences, standard errors and caveats."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from adlm import __version__
from adlm.apps.paper.reproduction import Comparison, compare_with_table, named_row, plot_comparisons
from adlm.apps.paper.results import ACCURACIES, DECIMALS, TABLES, PublishedTable, Result, read_results, results_of
from adlm.apps.plots import check_plot_path
from adlm.cli.console import Console, Stages
from adlm.cli.perplexity import MeasurementRequest
from adlm.cli.streams import write_error
from adlm.config.schema import PackingName
from adlm.errors import UserError, printable
from adlm.files import check_output, write_file
from adlm.likelihood.settings import AUTO, ESTIMATOR_LINES, MEASURING, PerplexitySettings
from adlm.likelihood.text_sets import check_names
from adlm.request import narrow, option

EVALUATION_ERROR_ONLY = "our standard errors cover the evaluation only, not the variance between training runs"
COLUMNS = ("row", "of", "published", "model", "ours", "±", "difference", "in errors", "verdict")
NAMES = {"monte_carlo": "Monte Carlo"}
STYLES = {"agrees": "green", "differs": "red", "undecided": "yellow", "not comparable": "dim", "missing": "dim"}


@dataclass(frozen=True)
class ReproduceRequest(MeasurementRequest):
    """The options of `adlm reproduce`."""

    example = """adlm reproduce owt-ppl                                        print the published table
  adlm reproduce owt-ppl model.ckpt --tokenizer gpt2 --row adlm-262B --out owt.json --plot owt.svg
  adlm reproduce zero-shot zero-shot.json --row adlm-524B --markdown
  adlm reproduce generation cards/*.json"""

    table: str = option(choices={name: table.title for name, table in TABLES.items()}, positional=True, metavar="TABLE")
    models: tuple[str, ...] = option(
        "model folders, run folders, names on the hub or .ckpt files (with --tokenizer) to measure, or\n"
        "JSON results of `adlm perplexity --out` and `adlm judge --out`",
        (),
        positional=True,
    )
    row: tuple[str, ...] = option("row of the table: once for all models, or once per model", (), repeated=True)
    markdown: bool = option("print a Markdown table", False)
    force: bool = option("replace files that adlm did not write", False)
    json: bool = option("print JSON", False)
    out: Path | None = option("write the comparison as JSON; rerun the same command to resume", None)
    plot: Path | None = option("plot published and measured values with error bars (.png, .svg, .pdf)", None)
    data: tuple[str, ...] = option(
        "the table's texts, such as a prepared folder (default: the corpora by name)",
        (),
        group=MEASURING,
        metavar="DATA",
    )
    estimator: str = option(
        "used in addition to the published one (default: auto)", AUTO, group=MEASURING, choices=ESTIMATOR_LINES
    )
    packing: PackingName | None = option("(default: that of the table)", None, group=MEASURING)


def run(request: ReproduceRequest) -> int:
    table = TABLES[request.table]
    rows = _rows(request.row, len(request.models), table)
    inputs = [Path(name) for name in (*request.models, *request.data, request.tokenizer) if name]
    check_output(request.out, force=request.force, inputs=inputs)
    if request.plot is not None:
        check_plot_path(request.plot, "--plot", request.force, inputs)
    if request.plot is not None and request.out is not None and request.plot.resolve() == request.out.resolve():
        raise UserError(f"--out and --plot are both {request.out}; give two different files")
    is_measured = [_is_measured(model, table) for model in request.models]
    check_names(request.data)
    group: AbstractContextManager[bool] = nullcontext(True)
    if any(is_measured) or "WORLD_SIZE" in os.environ:
        from adlm.distributed import process_group

        group = process_group(write_error)
    with group as is_rank_zero:
        results_and_rows: list[tuple[list[Result], str]] = []
        journals: list[Path] = []
        for model, row, measured in zip(request.models, rows, is_measured, strict=True):
            if measured:
                figures, new_journals = _measure(model, table, request, is_rank_zero)
                content: Any = {"adlm": __version__, "figures": figures}
                journals += new_journals
            else:
                content = read_results(Path(model))
            results_and_rows += _group_by_model(results_of(content, table, model), row)
        if is_rank_zero:
            _write_report(table, compare_with_table(table, results_and_rows), request)
        if is_rank_zero and journals:
            from adlm.likelihood.measurement import delete_journal

            for journal in journals:
                delete_journal(journal)
    return 0


def _rows(requested: Sequence[str], num_models: int, table: PublishedTable) -> Sequence[str]:
    """The row for every model, empty if --row is not given."""
    for row in requested:
        named_row(table, row)  # raises if there is none
    if len(requested) > 1 and len(requested) != num_models:
        raise UserError(
            f"--row is given {len(requested)} times for {num_models} models; give it once, or once per model"
        )
    return requested if len(requested) > 1 else (list(requested) or [""]) * num_models


def _is_measured(model: str, table: PublishedTable) -> bool:
    """Whether a word names a model, which is measured, and not a file of results."""
    path = Path(model)
    if path.suffix == ".json" or (path.is_file() and path.suffix != ".ckpt"):
        return False
    if table.kind == "card":
        raise UserError(
            f"{model}: table {table.name} needs metric cards; make one with `adlm sample {model} --out S.jsonl`, "
            "then `adlm judge S.jsonl --out card.json`"
        )
    if table.kind == "accuracy":
        raise UserError(
            f"{model}: adlm cannot evaluate models on table {table.name} yet; give accuracies as JSON ({ACCURACIES})"
        )
    return True


def _measure(
    model: str, table: PublishedTable, request: ReproduceRequest, is_rank_zero: bool
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Results as `adlm perplexity` writes them: with the published estimator, and with --estimator on the same rows.

    The journals are to be deleted once the results are written.
    """
    from adlm.apps.perplexity import TextSelection, measure_models, with_tokenizer
    from adlm.distributed import local_device
    from adlm.language_model import load

    protocol, device = table.protocol, local_device(request.device)
    assert protocol is not None
    lm = with_tokenizer(load(model, str(device)), request.tokenizer, model)
    names = request.data or (("zero-shot",) if len(protocol.corpora) > 1 else tuple(protocol.corpora["perplexity"]))
    texts = TextSelection(names, request.packing or protocol.packing)
    figures: list[dict[str, Any]] = []
    journals: list[Path] = []
    own = narrow(request, PerplexitySettings)
    published = replace(own, estimator="published", order=None, order_steps=None)
    for settings in dict.fromkeys((published,) if lm.method.exact else (published, own)):
        with Stages("tokens", enabled=is_rank_zero, limit="--max-tokens") as stages:
            measured = measure_models({model: lm}, texts, settings, request.out, stages.update)
        figures += [asdict(result) for result in measured.results]
        journals += measured.journals
    return figures, journals


def _group_by_model(results: list[Result], row: str) -> Iterator[tuple[list[Result], str]]:
    """Results by model: a JSON file may hold several. A card's reference data (method "data") has its own row."""
    for model, method in dict.fromkeys((result.model, result.method) for result in results):
        group = [result for result in results if (result.model, result.method) == (model, method)]
        yield group, "" if method == "data" else row


def _write_report(table: PublishedTable, comparisons: Sequence[Comparison], request: ReproduceRequest) -> None:
    report = {
        "adlm": __version__,
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "caveats": _caveats(table, comparisons),
        "comparisons": [asdict(each) for each in comparisons],
    }
    if request.out is not None:
        write_file(request.out, json.dumps(report, indent=1) + "\n")
    if request.plot is not None:
        plot_comparisons(table, comparisons, request.plot)
    if request.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif request.markdown:
        sys.stdout.write(printable(_format_markdown(table, comparisons)))
    else:
        _print_table(table, comparisons)


def _format_markdown(table: PublishedTable, comparisons: Sequence[Comparison]) -> str:
    """The table, followed by the comparisons and caveats as a list."""
    columns = _columns(comparisons)
    lines = [columns, ["---"] * len(columns), *(_cells(each, columns) for each in comparisons)]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    notes = [f"- {line}" for line in (*_format_comparisons(comparisons), *_caveats(table, comparisons))]
    header = f"**{table.name}**: {table.title}. Published: {table.source}."
    return "\n".join([header, "", *rows, "", *notes]) + "\n"


def _columns(comparisons: Sequence[Comparison], wide: bool = True) -> list[str]:
    """Without a model, only the published columns; a terminal gets fewer columns (wide=False)."""
    if not any(each.model for each in comparisons):
        return list(COLUMNS[:3])
    omitted = {"model", "difference"} | (set() if len({each.column for each in comparisons}) > 1 else {"of"})
    return [column for column in COLUMNS if wide or column not in omitted]


def _cells(each: Comparison, columns: Sequence[str]) -> list[str]:
    form = f".{DECIMALS[each.unit]}f"
    estimator = f" {Path(each.how).name}" if each.how else ""
    cells = {
        "row": each.row,
        "of": each.column,
        "published": format(each.published, form),
        "model": each.model,
        "ours": "" if each.ours is None else f"{each.ours:{form}}{estimator}",
        "±": ", ".join(
            f"{error:.2g} {NAMES.get(source, source)}" for source, error in each.errors.items() if error is not None
        ),
        "difference": "" if each.difference is None else f"{each.difference:+{form}}",
        "in errors": "" if each.in_errors is None else f"{each.in_errors:+.1f}",
        "verdict": each.verdict,
    }
    return [cells[column] for column in columns]


def _format_comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    """For every result: its row, verdict, reason and differing settings; for missing results, the command to run."""
    lines = []
    for each in comparisons:
        name = f"{each.model} on {each.column}" if each.column != each.unit else each.model
        name += f" ({each.how})" if each.how else ""
        if each.ours is not None:
            differs = "; ".join(each.differs) or "none known"
            lines.append(
                f"{name} is compared with {each.row}, {each.held_because}: {each.verdict}"
                f"{': ' if each.verdict == 'not comparable' else ', '}{each.because}. Settings that differ: {differs}."
            )
    if not lines:  # only the published table: the commands are in the JSON
        return []
    missing: dict[str, list[str]] = {}
    for each in comparisons:
        if each.command:
            missing.setdefault(each.command, []).append(f"{each.row} on {each.column}" if each.model else each.row)
    for command, rows in missing.items():
        lines.append(f"missing: {', '.join(dict.fromkeys(rows))}; run: {command}")
    return lines


def _caveats(table: PublishedTable, comparisons: Sequence[Comparison]) -> list[str]:
    compared_rows = {each.row for each in comparisons}
    row_caveats = [f"{row.name}: {caveat}" for row in table.rows if row.name in compared_rows for caveat in row.caveats]
    general = [EVALUATION_ERROR_ONLY] if any(each.ours is not None for each in comparisons) else []
    if table.kind == "accuracy":
        general.append(
            f"adlm has no command yet to fine-tune or evaluate these models; give accuracies as JSON: {ACCURACIES}"
        )
    return [*table.caveats, *(line for line in row_caveats if line.partition(": ")[2] not in table.caveats), *general]


def _print_table(table: PublishedTable, comparisons: Sequence[Comparison]) -> None:
    console = Console()
    columns = _columns(comparisons, wide=not console.is_terminal)
    console.print(f"{table.name}: {table.title}", style="bold")
    printed = Table(*columns, box=None)
    for column in (printed.columns[0], printed.columns[-1]):
        column.no_wrap, column.overflow = True, "fold"
    for each in comparisons:
        printed.add_row(*_cells(each, columns), style=STYLES[each.verdict] if len(columns) > 3 else None)
    console.print(printed)
    for line in _format_comparisons(comparisons):
        console.print(line, soft_wrap=True)
    for line in (f"published: {table.source}", *_caveats(table, comparisons)):
        console.print(line, style="dim", soft_wrap=True)
