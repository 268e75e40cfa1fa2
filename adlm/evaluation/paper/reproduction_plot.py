"""A table's published figures beside ours, as a picture. Knows nothing of how either came about.

A line a figure, a panel a unit. Bars reach two standard errors of ours, as agreement does. Beside one of ours that does
not compare, the published figure is only a shadow.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adlm.errors import printable
from adlm.evaluation.paper.published_tables import DECIMALS, PAPER, PublishedTable
from adlm.evaluation.paper.reproduction import ERRORS_APART, Comparison
from adlm.evaluation.plotting import GREY, INK, SMALL, literal_text, logarithmic, new_figure, save_figure, style_axes

STYLES = {
    "agrees": ("o", "#009e73"),
    "differs": ("s", "#d55e00"),
    "undecided": ("^", "#e69f00"),
    "not comparable": ("X", GREY),
}
"""Marker and colour of ours, by verdict."""
SHADOW = "#cfcfcf"
WIDE, NARROW = 0.42, 0.25  # inches of a line with a model of ours, and of one without
CAPTION = f"open diamonds: published, no error known; bars: {ERRORS_APART:g} standard errors of ours"


class Line(NamedTuple):
    """What the figures of a line have in common; it is told at the left."""

    row: str
    column: str
    """Empty where the unit has one."""
    model: str
    how: str
    """The estimator, where two stand side by side."""

    def __str__(self) -> str:
        first = [self.row, self.column]
        second = ["/".join(Path(self.model).parts[-2:]) if self.model else "", self.how]
        return printable("\n".join(filter(None, (", ".join(filter(None, words)) for words in (first, second)))))


def plot_reproduction(table: PublishedTable, comparisons: Sequence[Comparison], path: Path) -> None:
    with literal_text():
        save_figure(_drawn(table, comparisons), path)


def _drawn(table: PublishedTable, comparisons: Sequence[Comparison]) -> Any:
    units = list(dict.fromkeys(each.unit for each in comparisons))
    places = _places(dict.fromkeys(_line(each, comparisons) for each in comparisons))
    bottom = max(places.values()) + NARROW
    figure = new_figure(7.5 if len(units) == 1 else 1.6 + 3.1 * len(units), 1.1 + bottom)
    every = figure.subplots(1, len(units), squeeze=False, sharey=True)[0]
    for axes, unit in zip(every, units, strict=True):
        style_axes(axes, grid="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(unit, fontsize=9)
        _figures(axes, [(each, places[_line(each, comparisons)]) for each in comparisons if each.unit == unit])
    every[0].set_yticks(list(places.values()), map(str, places), fontsize=SMALL)
    every[0].set_ylim(bottom, 0)
    if len(units) == 1:
        for each in comparisons:
            _told(every[0], each, places[_line(each, comparisons)])
    else:
        _legend(figure, every)
    figure.suptitle(f"{table.name}: {table.title} ({PAPER})", fontsize=10)
    figure.supxlabel(CAPTION, fontsize=SMALL, color=GREY)
    return figure


def _places(lines: Iterable[Line]) -> dict[Line, float]:
    """How far down each stands, in inches."""
    places: dict[Line, float] = {}
    reached = 0.0
    for line in lines:
        height = WIDE if line.model else NARROW
        places[line] = reached + height / 2
        reached += height
    return places


def _line(each: Comparison, comparisons: Sequence[Comparison]) -> Line:
    columns = {other.column for other in comparisons if other.unit == each.unit}
    its = (each.row, each.column, each.model)
    hows = {other.how for other in comparisons if (other.row, other.column, other.model) == its}
    return Line(each.row, each.column if len(columns) > 1 else "", each.model, each.how if len(hows) > 1 else "")


def _figures(axes: Any, panel: Sequence[tuple[Comparison, float]]) -> None:
    values = [value for each, _ in panel for value in (each.published, each.ours) if value is not None]
    if all("perplexity" in each.unit for each, _ in panel) and max(values) > 4 * min(values):
        logarithmic(axes, "x", max(values) / min(values))
    for each, y in panel:
        colour = SHADOW if each.verdict == "not comparable" else INK
        axes.plot(each.published, y, "D", markersize=6, fillstyle="none", color=colour, zorder=3)
        if each.ours is not None:
            marker, colour = STYLES[each.verdict]
            reach = ERRORS_APART * each.stderr if each.stderr else None
            style = {"fmt": marker, "markersize": 5, "capsize": 2, "elinewidth": 1.2, "color": colour}
            axes.errorbar(each.ours, y, xerr=reach, label=f"ours, {each.verdict}", **style)
    axes.margins(x=0.08)


def _told(axes: Any, each: Comparison, y: float) -> None:
    """At the right: ours, and how far it is from the published figure."""
    if each.ours is None:
        return
    apart = "" if each.in_errors is None else f", {each.in_errors:+.1f} errors"
    words = f"{each.ours:.{DECIMALS[each.unit]}f}  {each.verdict}{apart}"
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    axes.annotate(words, (1.01, y), fontsize=SMALL, color=STYLES[each.verdict][1], **place)


def _legend(figure: Any, every: Sequence[Any]) -> None:
    """Of several panels, none of which has room for words."""
    handles = {name: handle for axes in every for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        style = {"loc": "outside upper right", "ncols": len(handles), "fontsize": SMALL, "frameon": False}
        figure.legend(handles.values(), handles.keys(), **style)
