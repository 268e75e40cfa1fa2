"""`adlm reproduce`: a table of the paper beside models of ours, with errors, differences and what is not the same."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from adlm import __version__
from adlm.cli.console import Console, Stages, write_error
from adlm.config.knobs import suggestion
from adlm.distributed import local_device, process_group
from adlm.errors import UserError, printable
from adlm.evaluation.model_perplexity import TextSelection, measure_models, with_tokenizer
from adlm.evaluation.paper.published_tables import DECIMALS, TABLES, PublishedTable
from adlm.evaluation.paper.reproduction import Comparison, compare_with_table
from adlm.evaluation.paper.reproduction_plot import plot_reproduction
from adlm.evaluation.paper.results import ACCURACIES, Result, read_results, results_of
from adlm.evaluation.plotting import check_plot_path
from adlm.files import check_output, write_file
from adlm.language_model import load
from adlm.likelihood.estimators import ESTIMATORS
from adlm.likelihood.perplexity import AUTO, PerplexitySettings, delete_journal

EXAMPLE = """adlm reproduce owt-ppl                                        the published figures alone
  adlm reproduce owt-ppl model.ckpt --row adlm-262B --out owt.json --plot owt.svg
  adlm reproduce zero-shot zero-shot.json --row adlm-524B --markdown
  adlm reproduce generation cards/*.json"""

OWN_ERRORS = "errors of ours are of the evaluation: how much one training run differs from another is in none of them"
COLUMNS = ("row", "of", "published", "model", "ours", "±", "difference", "in errors", "verdict")
STYLES = {"agrees": "green", "differs": "red", "undecided": "yellow", "not comparable": "dim", "missing": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "table",
        metavar="TABLE",
        help="\n".join(f"{name}: {table.title}" for name, table in TABLES.items()),
    )
    add(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="model folders, run folders or .ckpt files, which are measured; or JSON of\n"
        "`adlm perplexity --out` and `adlm judge --out`, which is read",
    )
    add("--row", action="append", default=[], metavar="R", help="of the table: for all models, or once for each")
    add("--markdown", action="store_true", help="as a Markdown table")
    add("--force", action="store_true", help="replace files that adlm did not write")
    add("--json", action="store_true", help="for machines")
    add("--out", metavar="FILE", type=Path, help="write the comparison as JSON; interrupted, measuring goes on")
    add("--plot", metavar="FILE", type=Path, help="draw published and ours with error bars (.png, .svg, .pdf)")
    measuring = parser.add_argument_group("measuring a model")
    add = measuring.add_argument
    add("--data", nargs="+", metavar="DATA", help="where the table's texts are, such as a prepared folder (by name)")
    add("--packing", metavar="P", help="packed (nothing dropped) or packed-published (the table's own)")
    add("--estimator", default=AUTO, choices=(AUTO, *ESTIMATORS), help="ours, beside the published one (auto)")
    add("--samples", type=int, default=4, metavar="K", help="replicates of it (4)")
    add("--max-tokens", type=int, metavar="N", help="measure about so many, from all over each text")
    add("--tokenizer", metavar="T", help="for a model that has none: a name, a file or a folder")
    add("--seed", type=int, default=0, metavar="S", help="of the draws (0)")
    add("--batch", type=int, metavar="B", help="rows read at once (of 8,192 tokens in all); changes no figure")
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu")


def run(arguments: argparse.Namespace) -> int:
    table = _table(arguments.table)
    rows = _rows(arguments.row, len(arguments.models), table)
    inputs = [Path(name) for name in (*arguments.models, *(arguments.data or ()), arguments.tokenizer) if name]
    check_output(arguments.out, force=arguments.force, inputs=inputs)
    if arguments.plot is not None:
        check_plot_path(arguments.plot, "--plot", arguments.force, inputs)
    if arguments.plot is not None and arguments.out is not None and arguments.plot.resolve() == arguments.out.resolve():
        raise UserError(f"--out and --plot are both {arguments.out}; give two files")
    with process_group(write_error) as first:
        held: list[tuple[list[Result], str]] = []
        journals: list[Path] = []
        for model, row in zip(arguments.models, rows, strict=True):
            findings, kept = _findings(model, table, arguments, first)
            held += _by_model(findings, row)
            journals += kept
        comparisons = compare_with_table(table, held)
        if first:
            _tell(table, comparisons, arguments)
            for journal in journals:
                delete_journal(journal)
    return 0


def _table(name: str) -> PublishedTable:
    if name not in TABLES:
        raise UserError(f"there is no table {name!r}{suggestion(name, TABLES)} (there are {', '.join(TABLES)})")
    return TABLES[name]


def _rows(asked: list[str], num: int, table: PublishedTable) -> list[str]:
    """A row for every model, empty where none is asked for."""
    known = [row.name for row in table.rows]
    for row in asked:
        if row not in known:
            raise UserError(
                f"--row {row!r} is not in table {table.name}{suggestion(row, known)}; its rows are {', '.join(known)}"
            )
    if len(asked) > 1 and len(asked) != num:
        raise UserError(f"--row is given {len(asked)} times for {num} models; give it once, or once for each")
    return asked if len(asked) > 1 else (asked or [""]) * num


def _findings(
    model: str, table: PublishedTable, arguments: argparse.Namespace, first: bool
) -> tuple[list[Result], list[Path]]:
    """Read or measured; and the journals of what was measured, which may go once it is written."""
    path = Path(model)
    if path.suffix == ".json" or (path.is_file() and path.suffix != ".ckpt"):
        return results_of(read_results(path), table, model), []
    if table.kind == "card":
        raise UserError(
            f"{model}: table {table.name} is held against cards; make one with `adlm sample {model} --out S.jsonl`, "
            "then `adlm judge S.jsonl --out card.json`"
        )
    if table.kind == "accuracy":
        raise UserError(
            f"{model}: nothing here scores a model on table {table.name} yet; give accuracies as JSON ({ACCURACIES})"
        )
    figures, journals = _measured(model, table, arguments, first)
    return results_of({"adlm": __version__, "figures": figures}, table, model), journals


def _measured(
    model: str, table: PublishedTable, arguments: argparse.Namespace, first: bool
) -> tuple[list[dict[str, Any]], list[Path]]:
    """As `adlm perplexity` writes it: by the published estimator, and by ours on the same rows."""
    protocol, device = table.protocol, local_device(arguments.device)
    assert protocol is not None
    lm = with_tokenizer(load(model, str(device)), arguments.tokenizer, model)
    names = tuple(arguments.data or (["zero-shot"] if len(protocol.corpora) > 1 else protocol.corpora["perplexity"]))
    texts = TextSelection(names, arguments.packing or protocol.packing)
    figures: list[dict[str, Any]] = []
    journals: list[Path] = []
    for estimator in dict.fromkeys(("published",) if lm.method.exact else ("published", arguments.estimator)):
        recipe = PerplexitySettings(estimator, arguments.samples, arguments.seed, arguments.batch, arguments.max_tokens)
        with Stages("groups of rows", shown=first) as stages:
            found = measure_models({model: lm}, texts, recipe, arguments.out, stages.tell)
        figures += [asdict(line) for line in found.lines]
        journals += found.journals
    return figures, journals


def _by_model(findings: list[Result], row: str) -> Iterator[tuple[list[Result], str]]:
    """One JSON may hold several models; the data that a card's samples were compared with has a row of its own."""
    for model, method in dict.fromkeys((finding.model, finding.method) for finding in findings):
        ours = [finding for finding in findings if (finding.model, finding.method) == (model, method)]
        yield ours, "" if method == "data" else row


def _tell(table: PublishedTable, comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> None:
    told = {
        "adlm": __version__,
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "caveats": _caveats(table, comparisons),
        "comparisons": [asdict(each) for each in comparisons],
    }
    if arguments.out is not None:
        write_file(arguments.out, json.dumps(told, indent=1) + "\n")
    if arguments.plot is not None:
        plot_reproduction(table, comparisons, arguments.plot)
    if arguments.json:
        sys.stdout.write(json.dumps(told) + "\n")
    elif arguments.markdown:
        sys.stdout.write(printable(markdown(table, comparisons)))
    else:
        _show(table, comparisons)


def markdown(table: PublishedTable, comparisons: Sequence[Comparison]) -> str:
    """The table, then what must be said beside it."""
    columns = _columns(comparisons)
    lines = [columns, ["---"] * len(columns), *(_cells(each, columns) for each in comparisons)]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    said = [f"- {line}" for line in (*_said(comparisons), *_caveats(table, comparisons))]
    head = f"**{table.name}**: {table.title}. Published: {table.source}."
    return "\n".join([head, "", *rows, "", *said]) + "\n"


def _columns(comparisons: Sequence[Comparison], wide: bool = True) -> list[str]:
    """Without any model, the published figures alone; a terminal has no room for every column."""
    if not any(each.model for each in comparisons):
        return list(COLUMNS[:3])
    spared = {"model", "difference"} | (set() if len({each.column for each in comparisons}) > 1 else {"of"})
    return [column for column in COLUMNS if wide or column not in spared]


def _cells(each: Comparison, columns: Sequence[str]) -> list[str]:
    form = f".{DECIMALS[each.unit]}f"
    how = f" {Path(each.how).name}" if each.how else ""
    cells = {
        "row": each.row,
        "of": each.column,
        "published": format(each.published, form),
        "model": each.model,
        "ours": "" if each.ours is None else f"{each.ours:{form}}{how}",
        "±": ", ".join(f"{error:.2g} {over}" for over, error in each.errors.items() if error is not None),
        "difference": "" if each.difference is None else f"{each.difference:+{form}}",
        "in errors": "" if each.in_errors is None else f"{each.in_errors:+.1f}",
        "verdict": each.verdict,
    }
    return [cells[column] for column in columns]


def _said(comparisons: Sequence[Comparison]) -> list[str]:
    """Of every figure of ours: the row and why, the verdict's reason, what differs; of a missing one, its command."""
    lines = []
    for each in comparisons:
        name = f"{each.model} on {each.column}" if each.column != each.unit else each.model
        name += f" ({each.how})" if each.how else ""
        if each.ours is not None:
            differs = "; ".join(each.differs) or "none that is known"
            lines.append(
                f"{name} is held against {each.row}, {each.held_because}: {each.verdict}"
                f"{': ' if each.verdict == 'not comparable' else ', '}{each.because}. Settings that differ: {differs}."
            )
    if not lines:  # a reader's reference: the commands are in the JSON
        return []
    missing: dict[str, list[str]] = {}
    for each in comparisons:
        if each.command:
            missing.setdefault(each.command, []).append(f"{each.row} on {each.column}" if each.model else each.row)
    for command, rows in missing.items():
        lines.append(f"missing: {', '.join(dict.fromkeys(rows))}; made by: {command}")
    return lines


def _caveats(table: PublishedTable, comparisons: Sequence[Comparison]) -> list[str]:
    shown = {each.row for each in comparisons}
    of_rows = [f"{row.name}: {caveat}" for row in table.rows if row.name in shown for caveat in row.caveats]
    own = [OWN_ERRORS] if any(each.ours is not None for each in comparisons) else []
    if table.kind == "accuracy":
        own.append(f"no command fine-tunes or scores these yet; accuracies are read from JSON: {ACCURACIES}")
    return [*table.caveats, *(line for line in of_rows if line.partition(": ")[2] not in table.caveats), *own]


def _show(table: PublishedTable, comparisons: Sequence[Comparison]) -> None:
    console = Console()
    columns = _columns(comparisons, wide=not console.is_terminal)
    console.print(f"{table.name}: {table.title}", style="bold")
    shown = Table(*columns, box=None)
    for column in (shown.columns[0], shown.columns[-1]):
        column.no_wrap, column.overflow = True, "fold"
    for each in comparisons:
        shown.add_row(*_cells(each, columns), style=STYLES[each.verdict] if len(columns) > 3 else None)
    console.print(shown)
    for line in _said(comparisons):
        console.print(line, soft_wrap=True)
    for line in (f"published: {table.source}", *_caveats(table, comparisons)):
        console.print(line, style="dim", soft_wrap=True)
