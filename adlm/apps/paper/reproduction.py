"""Our results against the published ones: the row to compare with, the difference, and other settings that differ.

Agreement means |ours - published| <= 2 standard errors of ours; the published side has none. No terminal output.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from adlm.apps.paper.results import (
    BATCH,
    DECIMALS,
    OTHER_SAMPLING,
    PAPER,
    SAMPLE_LENGTH,
    SAMPLES,
    PublishedRow,
    PublishedTable,
    Result,
    is_causal,
    published_sampling,
)
from adlm.apps.plots import ComparedResult, plot_reproduction
from adlm.config.options import suggestion
from adlm.config.schema import Anchor
from adlm.errors import UserError, printable

ERRORS_APART = 2.0
SAME_SIZE, SAME_TOKENS = 0.01, 0.02  # published ones are rounded: 293M, 262B

Verdict = Literal["agrees", "differs", "not comparable", "undecided", "missing"]


@dataclass(frozen=True)
class Comparison:
    """One published number, with our result where there is one. Written to JSON, field by field."""

    row: str
    title: str
    column: str
    unit: str
    published: float
    verdict: Verdict
    because: str
    """The reason for the verdict."""
    model: str = ""
    ours: float | None = None
    how: str = ""
    errors: Mapping[str, float | None] = field(default_factory=dict)
    stderr: float | None = None
    difference: float | None = None
    """Ours minus the published one."""
    in_errors: float | None = None
    """The difference in standard errors of ours."""
    held_because: str = ""
    """Why it is compared with this row."""
    differs: tuple[str, ...] = ()
    """Settings that differ from those of the row."""
    command: str = ""
    """The command that produces a missing result."""


def compare_with_table(table: PublishedTable, models: Sequence[tuple[Sequence[Result], str]]) -> list[Comparison]:
    """Every row of the table: with our results, in the given order, or with the command that produces one.

    A model is given by its results and the requested row, empty for the default.
    """
    by_row: dict[str, list[Comparison]] = {row.name: [] for row in table.rows}
    for results, requested in models:
        row, why = row_for(table, results[0], requested)
        by_row[row.name] += [compared(table, row, result, why) for result in results]
        columns = {result.column for result in results}
        # the MAUVE of the data with itself is 1 and has no result
        absent = [column for column in row.figures if column not in columns and row.method != "data"]
        by_row[row.name] += [_missing(table, row, column, results[0].model) for column in absent]
    comparisons: list[Comparison] = []
    for row in table.rows:
        columns_in_order = list(row.figures)
        ours = sorted(by_row[row.name], key=lambda each: columns_in_order.index(each.column))
        comparisons += ours or [_missing(table, row, column) for column in row.figures]
    return comparisons


def row_for(table: PublishedTable, result: Result, requested: str = "") -> tuple[PublishedRow, str]:
    """The row to compare a model with, and why."""
    if requested:
        return named_row(table, requested), "by --row"
    rows = [row for row in table.rows if row.method == result.method]
    if not rows:
        raise UserError(
            f"table {table.name} has no row of method {result.method}, which {result.model} is; give --row, one of "
            f"{', '.join(row.name for row in table.rows)}"
        )
    if len(rows) == 1:
        return rows[0], f"the only row of method {result.method}"
    same_options = [row for row in rows if row.options and not _option_differences(row, result, count_unknown=True)]
    if len(same_options) == 1:
        options = ", ".join(f"{option} {_format(value)}" for option, value in same_options[0].options.items())
        return same_options[0], f"the row of method {result.method} with {options}"
    # the nearest number of tokens, by ratio; none where it is unknown
    candidates, tokens = same_options or rows, result.tokens
    distances = {row.name: abs(math.log(row.tokens / tokens)) for row in candidates if row.tokens and tokens}
    nearest = [row for row in candidates if distances and distances.get(row.name) == min(distances.values())]
    if len(nearest) == 1:
        return nearest[0], f"of the rows of method {result.method}, the nearest in tokens trained"
    raise UserError(
        f"table {table.name} has several rows of method {result.method}, and {result.model} does not say which is "
        f"its own; give --row, one of {', '.join(row.name for row in rows)}"
    )


def named_row(table: PublishedTable, name: str) -> PublishedRow:
    rows = {row.name: row for row in table.rows}
    if name not in rows:
        raise UserError(
            f"--row {name!r} is not in table {table.name}{suggestion(name, rows)}; its rows are {', '.join(rows)}"
        )
    return rows[name]


def compared(table: PublishedTable, row: PublishedRow, result: Result, why: str = "") -> Comparison:
    if result.column not in row.figures:
        raise UserError(f"row {row.name} of table {table.name} has no figure for {result.column}")
    if table.kind == "card" and _option_differences(row, result) and OTHER_SAMPLING not in result.incomparable:
        result = replace(result, incomparable=(*result.incomparable, OTHER_SAMPLING))
    published = row.figures[result.column]
    difference, stderr = result.value - published, result.stderr
    in_errors = difference / stderr if stderr else None
    verdict, because = _verdict(result, difference, stderr)
    return Comparison(
        row=row.name,
        title=row.title,
        column=result.column,
        unit=table.units[result.column],
        published=published,
        verdict=verdict,
        because=because,
        model=result.model,
        ours=result.value,
        how=result.how,
        errors=result.errors,
        stderr=stderr,
        difference=difference,
        in_errors=in_errors if verdict != "not comparable" else None,
        held_because=why,
        differs=(*_model_differences(row, result), *result.differs),
    )


def _verdict(result: Result, difference: float, stderr: float | None) -> tuple[Verdict, str]:
    if result.incomparable:
        return "not comparable", "; ".join(result.incomparable)
    if stderr is None or not math.isfinite(stderr) or not math.isfinite(difference):
        return "undecided", "no standard error of ours is known"
    if abs(difference) <= ERRORS_APART * stderr:
        partial = f" ({result.partial})" if result.partial else ""
        return "agrees", f"within {ERRORS_APART:g} standard errors of ours{partial}; the published side has none"
    if result.partial:
        return "undecided", f"farther than {ERRORS_APART:g} errors, but those are {result.partial}"
    return "differs", f"farther than {ERRORS_APART:g} standard errors of ours; the published side has none"


def _model_differences(row: PublishedRow, result: Result) -> list[str]:
    differences = []
    if result.method != row.method:
        differences.append(f"method {result.method}, not {row.title}")
    differences += _option_differences(row, result)
    if row.tokens and result.tokens is None:
        differences.append(f"tokens trained unknown, published {row.tokens:g}B")
    elif row.tokens and result.tokens is not None and abs(result.tokens / row.tokens - 1) > SAME_TOKENS:
        differences.append(f"{result.tokens:.3g}B tokens trained (the paper's count), not {row.tokens:g}B")
    if row.parameters and result.parameters is None:
        differences.append(f"parameters unknown, published {row.parameters:g}M")
    elif row.parameters and result.parameters and abs(result.parameters / row.parameters - 1) > SAME_SIZE:
        differences.append(f"{result.parameters:.4g}M parameters, not {row.parameters:g}M")
    return differences


def _option_differences(row: PublishedRow, result: Result, count_unknown: bool = False) -> list[str]:
    """Options that differ from the row's. Unknown ones count for models of the row's method, or always on request."""
    differences = []
    for option, published in row.options.items():
        value = result.options.get(option)
        if value is None:
            if count_unknown or result.method == row.method:
                differences.append(f"{option} unknown, published {_format(published)}")
        elif value != published and not (isinstance(value, str) and value.startswith(str(published))):
            differences.append(f"{option} {_format(value)}, not {_format(published)}")
    return differences


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _missing(table: PublishedTable, row: PublishedRow, column: str, model: str = "") -> Comparison:
    because = f"no figure of {model}" if model else "no model was given for it"
    published, command = row.figures[column], command_for(table, row, column, model)
    return Comparison(
        row.name, row.title, column, table.units[column], published, "missing", because, model, command=command
    )


def command_for(table: PublishedTable, row: PublishedRow, column: str, model: str = "") -> str:
    """The command that produces the result of a row: the evaluation of `model`, or without one, its training."""
    if not row.method:
        return f"none here: {row.title} is not one of our methods"
    if table.kind == "accuracy":
        return "none yet: there is no command that fine-tunes or scores it; give its accuracies as JSON"
    if (row.method, column) == ("data", "mauve"):
        return "none: MAUVE of a text with itself is 1"
    if table.kind == "card":
        return _sampling_command(row, model)
    protocol = table.protocol
    assert protocol is not None
    if model:
        corpus = protocol.corpora[column][0]
        how = f"--packing {protocol.packing} --estimator published"
        return f"adlm perplexity {model} --data {corpus} {how} --out {corpus}.json"
    preset = f"{'lm1b' if protocol.trained_on == 'lm1b' else 'owt'}/{row.method}"
    anchor = Anchor()
    defaults = {"gamma": anchor.gamma, "tau": anchor.tau}
    words = [f"anchor.{option}={_format(value)}" for option, value in row.options.items() if value != defaults[option]]
    if row.tokens is not None:  # with the paper's batch size, to two digits, as the paper rounds its tokens
        steps = int(float(f"{row.tokens * 1e9 * 2 / (BATCH * protocol.length):.1e}"))
        words.append(f"train.steps={steps // 2 if is_causal(row.method) else steps}")
    return " ".join(["adlm train", preset, *words, f"--out runs/{table.name}/{row.name}"])


def _sampling_command(row: PublishedRow, model: str) -> str:
    if row.method == "data":
        return "adlm judge SAMPLES.jsonl --reference prepared/owt --judge-reference --out card.json"
    if is_causal(row.method):
        flags, sampler = "", "left-to-right"
    else:  # "remdm" matches any ReMDM sampler; remdm-loop is the one with published options
        sampler = "remdm-loop" if row.options["sampler"] == "remdm" else str(row.options["sampler"])
        flags = f" --sampler {sampler} --steps {row.options['steps']}"
    words = " ".join(f"sampling.{option}={_format(value)}" for option, value in published_sampling(sampler).items())
    return (
        f"adlm sample {model or 'MODEL'} --num {SAMPLES} --length {SAMPLE_LENGTH}{flags} {words} "
        f"--out {row.name}.jsonl && adlm judge {row.name}.jsonl --reference prepared/owt --out {row.name}.json"
    )


def plot_comparisons(table: PublishedTable, comparisons: Sequence[Comparison], path: Path) -> None:
    """Plot the published results with ours; bars are the limit of agreement."""
    caption = f"open diamonds: published, no error known; bars: {ERRORS_APART:g} standard errors of ours"
    models = {each.model for each in comparisons}
    short = {model: "/".join(Path(model).parts[-2:]) for model in models}
    names = {model: name if list(short.values()).count(name) == 1 else model for model, name in short.items()}
    results = []
    for each in comparisons:
        columns = {other.column for other in comparisons if other.unit == each.unit}
        key = (each.row, each.column, each.model)
        hows = {other.how for other in comparisons if (other.row, other.column, other.model) == key}
        first = [each.row, each.column if len(columns) > 1 else ""]
        second = [names[each.model], each.how if len(hows) > 1 else ""]
        in_errors = "" if each.in_errors is None else f", {each.in_errors:+.1f} errors"
        results.append(
            ComparedResult(
                line=printable("\n".join(filter(None, (", ".join(filter(None, parts)) for parts in (first, second))))),
                unit=each.unit,
                published=each.published,
                verdict=each.verdict,
                ours=each.ours,
                bar=ERRORS_APART * each.stderr if each.stderr else None,
                note="" if each.ours is None else f"{each.ours:.{DECIMALS[each.unit]}f}  {each.verdict}{in_errors}",
            )
        )
    plot_reproduction(f"{table.name}: {table.title} ({PAPER})", caption, results, path)
