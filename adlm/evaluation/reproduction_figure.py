"""A table's published figures beside ours, as a picture. Knows nothing of how either came about."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.evaluation.published_tables import PublishedTable
from adlm.evaluation.reproduction import ERRORS_APART, Comparison

FORMS = (".png", ".svg", ".pdf")
COLOURS = {"agrees": "tab:green", "differs": "tab:red", "not comparable": "tab:grey", "undecided": "tab:orange"}


def check_picture(path: Path) -> None:
    """What would fail after hours fails now."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    if path.suffix not in FORMS:
        raise UserError(f"--plot {path} is no picture; one ends in {', '.join(FORMS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.absolute().parent}")


def plot(table: PublishedTable, comparisons: Sequence[Comparison], path: Path) -> None:
    """A panel a unit, a line a figure; bars reach two standard errors of ours, as agreement does."""
    figure = _drawn(table, comparisons)
    partial = path.with_name(f".{path.name}")
    try:
        figure.savefig(partial, format=path.suffix[1:], dpi=130)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _drawn(table: PublishedTable, comparisons: Sequence[Comparison]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    units = list(dict.fromkeys(each.unit for each in comparisons))
    panels = [[each for each in comparisons if each.unit == unit] for unit in units]
    labels = [list(dict.fromkeys(_label(each) for each in panel)) for panel in panels]
    height = 1.9 + 0.3 * max(map(len, labels))
    figure = Figure(figsize=(max(8.0, 4.6 * len(units)), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, unit, panel, lines in zip(
        figure.subplots(1, len(units), squeeze=False)[0], units, panels, labels, strict=True
    ):
        _panel(axes, panel, lines)
        axes.set_xlabel(unit)
    handles = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(f"{table.name}: {table.title} ({table.source.partition(',')[0]})", fontsize=10)
    return figure


def _panel(axes: Any, panel: Sequence[Comparison], lines: list[str]) -> None:
    for each in panel:
        y = lines.index(_label(each))
        axes.plot(each.published, y, "D", color="black", fillstyle="none", label="published, no error known")
        if each.ours is None:
            continue
        reach = ERRORS_APART * (each.stderr or 0.0)
        colour = COLOURS[each.verdict]
        told = f"ours, {each.verdict}; bars of {ERRORS_APART:g} standard errors"
        axes.errorbar(each.ours, y, xerr=reach, fmt="o", capsize=3, color=colour, label=told, alpha=0.8)
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    values = [value for each in panel for value in (each.published, each.ours) if value is not None]
    if min(values) > 0 and max(values) > 4 * min(values):
        axes.set_xscale("log")
    axes.grid(alpha=0.3, axis="x")


def _label(each: Comparison) -> str:
    """A line: the row, its column where the table has several, and our estimator where two stand side by side."""
    column = "" if each.column in (each.unit, "mauve", "gen-ppl", "entropy") else f", {each.column}"
    ours = f" ({Path(each.model).name}, {each.how})" if each.ours is not None and each.how else ""
    return f"{each.row}{column}{ours}"
