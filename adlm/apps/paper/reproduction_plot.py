"""Plot of a table's published results with ours. Computes no results.

One line per result, one panel per unit. Bars are two standard errors of ours, the limit of agreement. Next to a result
of ours that is not comparable, the published one is pale.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adlm.apps.paper.published_tables import DECIMALS, PAPER, PublishedTable
from adlm.apps.paper.reproduction import ERRORS_APART, Comparison
from adlm.apps.plots import GREY, INK, SMALL, literal_text, logarithmic, new_figure, save_figure, style_axes
from adlm.errors import printable

STYLES = {
    "agrees": ("o", "#009e73"),
    "differs": ("s", "#d55e00"),
    "undecided": ("^", "#e69f00"),
    "not comparable": ("X", GREY),
}
"""Marker and colour of ours, by verdict."""
PALE = "#cfcfcf"
TALL, SHORT = 0.42, 0.25  # height in inches of a line with a model of ours, and of one without
CAPTION = f"open diamonds: published, no error known; bars: {ERRORS_APART:g} standard errors of ours"


class Line(NamedTuple):
    """The label at the left of a line."""

    row: str
    column: str
    """Empty where the unit has only one column."""
    model: str
    how: str
    """The estimator, where there are several."""

    def __str__(self) -> str:
        first = [self.row, self.column]
        second = ["/".join(Path(self.model).parts[-2:]) if self.model else "", self.how]
        return printable("\n".join(filter(None, (", ".join(filter(None, parts)) for parts in (first, second)))))


def plot_reproduction(table: PublishedTable, comparisons: Sequence[Comparison], path: Path) -> None:
    with literal_text():
        save_figure(_draw(table, comparisons), path)


def _draw(table: PublishedTable, comparisons: Sequence[Comparison]) -> Any:
    units = list(dict.fromkeys(each.unit for each in comparisons))
    heights = _line_positions(dict.fromkeys(_line(each, comparisons) for each in comparisons))
    bottom = max(heights.values()) + SHORT
    figure = new_figure(7.5 if len(units) == 1 else 1.6 + 3.1 * len(units), 1.1 + bottom)
    all_axes = figure.subplots(1, len(units), squeeze=False, sharey=True)[0]
    for axes, unit in zip(all_axes, units, strict=True):
        style_axes(axes, grid="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(unit, fontsize=9)
        _draw_panel(axes, [(each, heights[_line(each, comparisons)]) for each in comparisons if each.unit == unit])
    all_axes[0].set_yticks(list(heights.values()), map(str, heights), fontsize=SMALL)
    all_axes[0].set_ylim(bottom, 0)
    if len(units) == 1:
        for each in comparisons:
            _annotate(all_axes[0], each, heights[_line(each, comparisons)])
    else:
        _draw_legend(figure, all_axes)
    figure.suptitle(f"{table.name}: {table.title} ({PAPER})", fontsize=10)
    figure.supxlabel(CAPTION, fontsize=SMALL, color=GREY)
    return figure


def _line_positions(lines: Iterable[Line]) -> dict[Line, float]:
    """The distance of each line from the top, in inches."""
    positions: dict[Line, float] = {}
    top = 0.0
    for line in lines:
        height = TALL if line.model else SHORT
        positions[line] = top + height / 2
        top += height
    return positions


def _line(each: Comparison, comparisons: Sequence[Comparison]) -> Line:
    columns = {other.column for other in comparisons if other.unit == each.unit}
    key = (each.row, each.column, each.model)
    hows = {other.how for other in comparisons if (other.row, other.column, other.model) == key}
    return Line(each.row, each.column if len(columns) > 1 else "", each.model, each.how if len(hows) > 1 else "")


def _draw_panel(axes: Any, panel: Sequence[tuple[Comparison, float]]) -> None:
    values = [value for each, _ in panel for value in (each.published, each.ours) if value is not None]
    if all("perplexity" in each.unit for each, _ in panel) and max(values) > 4 * min(values):
        logarithmic(axes, "x", max(values) / min(values))
    for each, y in panel:
        colour = PALE if each.verdict == "not comparable" else INK
        axes.plot(each.published, y, "D", markersize=6, fillstyle="none", color=colour, zorder=3)
        if each.ours is not None:
            marker, colour = STYLES[each.verdict]
            bar = ERRORS_APART * each.stderr if each.stderr else None
            style = {"fmt": marker, "markersize": 5, "capsize": 2, "elinewidth": 1.2, "color": colour}
            axes.errorbar(each.ours, y, xerr=bar, label=f"ours, {each.verdict}", **style)
    axes.margins(x=0.08)


def _annotate(axes: Any, each: Comparison, y: float) -> None:
    """At the right: our value, the verdict and the difference in standard errors."""
    if each.ours is None:
        return
    in_errors = "" if each.in_errors is None else f", {each.in_errors:+.1f} errors"
    text = f"{each.ours:.{DECIMALS[each.unit]}f}  {each.verdict}{in_errors}"
    position = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    axes.annotate(text, (1.01, y), fontsize=SMALL, color=STYLES[each.verdict][1], **position)


def _draw_legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """A legend for several panels, which have no space for annotations."""
    handles = {
        name: handle for axes in all_axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        style = {"loc": "outside upper right", "ncols": len(handles), "fontsize": SMALL, "frameon": False}
        figure.legend(handles.values(), handles.keys(), **style)
