"""A finding beside the published figure: which row it is held against, how far apart they are, what else differs.

Agreement is |ours - published| <= 2 standard errors of ours: the published side has none to add. Knows no screens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from adlm.config.knobs import suggestion
from adlm.config.schema import Anchor
from adlm.errors import UserError
from adlm.evaluation.paper.published_tables import BATCH, PublishedRow, PublishedTable, published_sampling
from adlm.evaluation.paper.results import LEFT_TO_RIGHT, OTHER_SAMPLING, SAMPLE_LENGTH, SAMPLES, Result

ERRORS_APART = 2.0
SAME_SIZE, SAME_TOKENS = 0.01, 0.02  # published ones are rounded: 293M, 262B

Verdict = Literal["agrees", "differs", "not comparable", "undecided", "missing"]


@dataclass(frozen=True)
class Comparison:
    """One published figure, and ours beside it where there is one."""

    row: str
    title: str
    column: str
    unit: str
    published: float
    verdict: Verdict
    because: str
    """Of the verdict."""
    model: str = ""
    ours: float | None = None
    how: str = ""
    errors: Mapping[str, float | None] = field(default_factory=dict)
    stderr: float | None = None
    difference: float | None = None
    """Ours minus the published one."""
    in_errors: float | None = None
    """The same in standard errors of ours."""
    held_because: str = ""
    """Why it is this row."""
    differs: tuple[str, ...] = ()
    """Settings that are not the row's."""
    command: str = ""
    """What would make a missing figure."""


def compare_with_table(table: PublishedTable, models: Sequence[tuple[Sequence[Result], str]]) -> list[Comparison]:
    """Every row of the table: with ours, in the order given, or with what would make one.

    A model is its findings and the row that was asked for, empty where none was.
    """
    held: dict[str, list[Comparison]] = {row.name: [] for row in table.rows}
    for findings, asked in models:
        row, why = row_for(table, findings[0], asked)
        held[row.name] += [compared(table, row, finding, why) for finding in findings]
        there = {finding.column for finding in findings}
        absent = [
            column for column in row.figures if column not in there and row.method != "data"
        ]  # MAUVE 1: no finding
        held[row.name] += [_missing(table, row, column, findings[0].model) for column in absent]
    return [each for row in table.rows for each in _in_order(table, row, held[row.name])]


def row_for(table: PublishedTable, finding: Result, asked: str = "") -> tuple[PublishedRow, str]:
    """The row that a model is held against, and why."""
    names = ", ".join(row.name for row in table.rows)
    if asked:
        for row in table.rows:
            if row.name == asked:
                return row, "by --row"
        known = [row.name for row in table.rows]
        raise UserError(f"--row {asked!r} is not in table {table.name}{suggestion(asked, known)}; its rows are {names}")
    rows = [row for row in table.rows if row.method == finding.method]
    if not rows:
        raise UserError(
            f"table {table.name} has no row of method {finding.method}, which {finding.model} is; give --row, one of "
            f"{names}"
        )
    if len(rows) == 1:
        return rows[0], f"the only row of method {finding.method}"
    alike = [row for row in rows if row.knobs and not list(_other_knobs(row, finding, unknown=True))]
    if len(alike) == 1:
        return alike[0], f"the row of method {finding.method} with {_knobs(alike[0])}"
    nearest = _nearest(alike or rows, finding.tokens)
    if len(nearest) == 1:
        return nearest[0], f"of the rows of method {finding.method}, the nearest in tokens trained"
    raise UserError(
        f"table {table.name} has several rows of method {finding.method}, and {finding.model} does not tell which is "
        f"its own; give --row, one of {', '.join(row.name for row in rows)}"
    )


def _nearest(rows: Sequence[PublishedRow], tokens: float | None) -> list[PublishedRow]:
    """Those whose number of tokens is nearest by ratio; none where it is not known."""
    far = {row.name: abs(math.log(row.tokens / tokens)) for row in rows if row.tokens and tokens}
    return [row for row in rows if row.name in far and far[row.name] == min(far.values())]


def compared(table: PublishedTable, row: PublishedRow, finding: Result, why: str = "") -> Comparison:
    if finding.column not in row.figures:
        raise UserError(f"row {row.name} of table {table.name} has no figure for {finding.column}")
    if table.kind == "card" and _other_knobs(row, finding) and OTHER_SAMPLING not in finding.incomparable:
        finding = replace(finding, incomparable=(*finding.incomparable, OTHER_SAMPLING))
    published = row.figures[finding.column]
    difference, stderr = finding.value - published, finding.stderr
    in_errors = difference / stderr if stderr else None
    verdict, because = _verdict(finding, difference, stderr)
    return Comparison(
        row=row.name,
        title=row.title,
        column=finding.column,
        unit=table.units[finding.column],
        published=published,
        verdict=verdict,
        because=because,
        model=finding.model,
        ours=finding.value,
        how=finding.how,
        errors=finding.errors,
        stderr=stderr,
        difference=difference,
        in_errors=in_errors if verdict != "not comparable" else None,
        held_because=why,
        differs=(*_other_model(row, finding), *finding.differs),
    )


def _verdict(finding: Result, difference: float, stderr: float | None) -> tuple[Verdict, str]:
    if finding.incomparable:
        return "not comparable", "; ".join(finding.incomparable)
    if stderr is None or not math.isfinite(stderr) or not math.isfinite(difference):
        return "undecided", "no standard error of ours is known"
    if abs(difference) <= ERRORS_APART * stderr:
        partial = f" ({finding.partial})" if finding.partial else ""
        return "agrees", f"within {ERRORS_APART:g} standard errors of ours{partial}; the published side has none"
    if finding.partial:
        return "undecided", f"farther than {ERRORS_APART:g} errors, but those are {finding.partial}"
    return "differs", f"farther than {ERRORS_APART:g} standard errors of ours; the published side has none"


def _other_model(row: PublishedRow, finding: Result) -> list[str]:
    told = []
    if finding.method != row.method:
        told.append(f"method {finding.method}, not {row.title}")
    told += _other_knobs(row, finding)
    if row.tokens is not None and finding.tokens is None:
        told.append(f"tokens trained unknown, published {row.tokens:g}B")
    elif row.tokens is not None and finding.tokens is not None and _apart(finding.tokens, row.tokens) > SAME_TOKENS:
        told.append(f"{finding.tokens:.3g}B tokens trained (the paper's count), not {row.tokens:g}B")
    if row.parameters is not None and finding.parameters is None:
        told.append(f"parameters unknown, published {row.parameters:g}M")
    elif row.parameters and finding.parameters and _apart(finding.parameters, row.parameters) > SAME_SIZE:
        told.append(f"{finding.parameters:.4g}M parameters, not {row.parameters:g}M")
    return told


def _other_knobs(row: PublishedRow, finding: Result, unknown: bool = False) -> list[str]:
    """Knobs that are not the row's; `unknown` counts those that are not told as other."""
    told = []
    for knob, wanted in row.knobs.items():
        found = finding.knobs.get(knob)
        if found is None:
            told += [f"{knob} unknown, published {_said(wanted)}"] if unknown or finding.method == row.method else []
        elif not _same(found, wanted):
            told.append(f"{knob} {_said(found)}, not {_said(wanted)}")
    return told


def _same(found: float | str, wanted: float | str) -> bool:
    return found.startswith(str(wanted)) if isinstance(found, str) else found == wanted


def _apart(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / theirs


def _said(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _knobs(row: PublishedRow) -> str:
    return ", ".join(f"{knob} {_said(value)}" for knob, value in row.knobs.items())


def _in_order(table: PublishedTable, row: PublishedRow, ours: list[Comparison]) -> list[Comparison]:
    if not ours:
        return [_missing(table, row, column) for column in row.figures]
    columns = list(row.figures)
    return sorted(ours, key=lambda each: columns.index(each.column))


def _missing(table: PublishedTable, row: PublishedRow, column: str, model: str = "") -> Comparison:
    command = command_for(table, row, column, model)
    because = f"no figure of {model}" if model else "no model was given for it"
    return Comparison(
        row.name,
        row.title,
        column,
        table.units[column],
        row.figures[column],
        "missing",
        because,
        model,
        command=command,
    )


def command_for(table: PublishedTable, row: PublishedRow, column: str, model: str = "") -> str:
    """What makes the figure of a row: the model's evaluation, or, where there is no model, its training first."""
    if not row.method:
        return f"none here: {row.title} is not one of our methods"
    if table.kind == "accuracy":
        return "none yet: there is no command that fine-tunes or scores it; give its accuracies as JSON"
    if (row.method, column) == ("data", "mauve"):
        return "none: MAUVE of a text with itself is 1"
    if table.kind == "card":
        return _generating(row, model)
    protocol = table.protocol
    assert protocol is not None
    if model:
        corpus = protocol.corpora[column][0]
        how = f"--packing {protocol.packing} --estimator published"
        return f"adlm perplexity {model} --data {corpus} {how} --out {corpus}.json"
    preset = f"{'lm1b' if protocol.trained_on == 'lm1b' else 'owt'}/{row.method}"
    usual = Anchor()
    own = {"gamma": usual.gamma, "tau": usual.tau}
    words = [f"anchor.{knob}={_said(value)}" for knob, value in row.knobs.items() if value != own[knob]]
    if row.tokens is not None:
        words.append(f"train.steps={_steps(row.tokens, row.method, protocol.length)}")
    return " ".join(["adlm train", preset, *words, f"--out runs/{table.name}/{row.name}"])


def _generating(row: PublishedRow, model: str) -> str:
    if row.method == "data":
        return "adlm judge SAMPLES.jsonl --reference prepared/owt --judge-reference --out card.json"
    if row.method in LEFT_TO_RIGHT:
        flags, sampler = "", "left-to-right"
    else:  # "remdm" is any sampler of ReMDM's; remdm-loop is the one whose settings are published
        sampler = "remdm-loop" if row.knobs["sampler"] == "remdm" else str(row.knobs["sampler"])
        flags = f" --sampler {sampler} --steps {row.knobs['steps']}"
    words = " ".join(f"sampling.{setting}={_said(value)}" for setting, value in published_sampling(sampler).items())
    return (
        f"adlm sample {model or 'MODEL'} --num {SAMPLES} --length {SAMPLE_LENGTH}{flags} {words} "
        f"--out {row.name}.jsonl && adlm judge {row.name}.jsonl --reference prepared/owt --out {row.name}.json"
    )


def _steps(billions: float, method: str, length: int) -> int:
    """Steps of the paper's batch, to two digits, as the paper rounds its tokens."""
    steps = int(float(f"{billions * 1e9 * 2 / (BATCH * length):.1e}"))
    return steps // 2 if method in LEFT_TO_RIGHT else steps
