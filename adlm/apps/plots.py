"""All plots: metric cards, published results with ours, training curves, and the loss chart of the quickstart's page.

Everything drawn is passed in or read from metrics.jsonl; nothing is measured here. Plots are drawn by matplotlib, which
is imported on use; the loss chart is SVG with the colours of its page, so that it follows the page's light and dark
theme and needs no package.
"""

import html
import importlib.util
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import PLOT_METADATA, check_output, replacing, scan_metrics

INK, GREY, PALE, WARNING = "#222222", "#8a8a8a", "#cfcfcf", "#a32020"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The colour-blind safe palette of Okabe and Ito."""
SMALL = 8
PUBLISHED = {"marker": "D", "markersize": 6, "fillstyle": "none", "linestyle": "none"}
"""How published values are drawn: as open diamonds."""


def check_plot_path(path: Path, option: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """Check that the plot can be written, before anything is computed for it."""
    _require_matplotlib()
    if path.suffix not in PLOT_METADATA:
        raise UserError(f"{option} {path} is not a plot file; it must end in {', '.join(PLOT_METADATA)}")
    check_output(path, option, force, inputs)


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure without a display, with its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path, dpi: int = 200) -> None:
    """Write the figure atomically, in the format of the suffix."""
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=dpi, metadata=PLOT_METADATA[path.suffix])


@contextmanager
def _literal_text() -> Iterator[None]:
    """Draw text literally: no mathtext, no warnings about characters missing from the font."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _style_axes(axes: Any, grid: str = "both") -> None:
    """Left and bottom spines only, and a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, color=GREY)


def _logarithmic(axes: Any, which: str, span: float) -> None:
    """A log scale with plain numbers at the ticks; fewer ticks for a large `span`, the ratio of largest to smallest."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if span < 30 else (1, 3)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


# Labels. The package adjustText (1.4) was tried in place of this class. Where points are crowded, its labels cover
# curves and each other and leave the axes; it cannot omit a label, and curves to avoid cost it ten seconds.

LABEL_DIRECTIONS = (*product((1, -1), (0.6, -0.6)), (0, 1), (0, -1), (1, 0), (-1, 0), *product((1, -1), (2, -2)))
"""Directions (x, y) from a point to its label, best first."""
LABEL_DISTANCES = (7, 11, 16, 22)
"""Distances of a label from its point, in printer's points, best first."""
CROWDED = 15  # pixels


class LabelPlacer:
    """Places labels on axes with fixed limits, where they cover neither curves nor other labels.

    `curves` are in data coordinates, (n, 2) each.
    """

    def __init__(self, axes: Any, curves: Sequence[NDArray[np.float64]]):
        self.axes, self._boxes = axes, list[Any]()
        ink = []
        axes.figure.draw_without_rendering()
        marker = np.array([*product((-5, 0, 5), repeat=2)])  # pixels around a vertex
        for curve in curves:
            corners = axes.transData.transform(curve)
            ink.append((corners[:, None] + marker).reshape(-1, 2))
            for start, stop in pairwise(corners):  # a point every two pixels
                ink.append(np.linspace(start, stop, max(2, int(np.hypot(*(stop - start)) / 2))))
        self._ink = np.concatenate(ink)

    def put(self, points: Sequence[tuple[float, float]], label: str, near: int = 0, **style: Any) -> None:
        """Place a label next to one of the points, where it covers least.

        With `near`, only the first `near` distances are tried, and the label is omitted if it would cover anything.
        """
        best, lowest_cost = None, math.inf
        for distance, point, (x, y) in product(LABEL_DISTANCES[: near or None], points, LABEL_DIRECTIONS):
            placed = {
                "xytext": (x * distance, y * distance),
                "ha": {1: "left", 0: "center", -1: "right"}[x],
                "va": "center" if x else ("bottom" if y > 0 else "top"),
            }
            text = self._annotate(label, point, placed | style)
            cost = self._cost(text.get_window_extent())
            text.remove()
            if cost < lowest_cost:
                best, lowest_cost = (point, placed | style), cost
            if cost == 0:
                break
        if best is not None and not (near and lowest_cost > 0):
            self._boxes.append(self._annotate(label, *best).get_window_extent().padded(1))

    def _annotate(self, label: str, point: tuple[float, float], style: dict[str, Any]) -> Any:
        style = {"fontsize": SMALL, "color": INK, "textcoords": "offset points", "in_layout": False} | style
        return self.axes.annotate(label, point, **style)

    def _cost(self, box: Any) -> float:
        """How much the box covers: pixels of curves, other labels, and worst, space outside the axes."""
        frame, (x, y) = self.axes.get_window_extent(), self._ink.T
        inside = (x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)
        outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
        return float(inside.sum() + 1000 * sum(box.overlaps(other) for other in self._boxes) + 10_000 * outside)

    def crowded(self, point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
        """Whether another of the points is so near that a label would be ambiguous."""
        pixel, *other_pixels = self.axes.transData.transform([point, *(other for other in points if other != point)])
        return any(np.hypot(*(other - pixel)) < CROWDED for other in other_pixels)


# Metric cards: generative perplexity against entropy, and MAUVE against sampling steps. Cards of one model and sampler
# form a curve in the order of their steps, with one colour per model and one line style per sampler.

MARKERS = "osD^vPX"
LINE_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class CardPoint:
    """The point of a card on a panel: entropy and generative perplexity, or sampling steps and MAUVE."""

    series: str
    """Model and sampler."""
    model: str
    options: tuple[str, ...]
    """Sampling options that are not at their default."""
    method: str
    steps: int | None
    """None for causal models."""
    judge: str
    """The judge, or for MAUVE the featuriser."""
    xy: tuple[float, float]
    errors: tuple[float, float]
    label: str | None
    """Why it is not comparable with published metrics."""
    comparable: bool


@dataclass(frozen=True)
class PublishedPoint:
    """A published row of metrics: MAUVE, generative perplexity and entropy by column name."""

    title: str
    method: str
    sampler: str
    steps: int | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class CardPoints:
    """What is drawn of several cards: a panel for each pair of metrics that some of them have."""

    perplexities: list[CardPoint]
    mauves: list[CardPoint]
    references: list[CardPoint]
    """Reference texts, where they were judged too, on the first panel."""
    published: list[PublishedPoint]
    """Drawn only on a panel whose cards are all comparable with them."""
    source: str
    """Of the published points."""


def plot_cards(cards: CardPoints, path: Path) -> None:
    if not cards.perplexities and not cards.mauves:
        raise UserError("none of the cards has perplexity and entropy, or MAUVE: there is nothing to draw")
    common = set.intersection(*(set(point.options) for point in (*cards.perplexities, *cards.mauves)))
    perplexities, mauves = (
        [
            replace(point, series=", ".join([point.series, *(each for each in point.options if each not in common)]))
            for point in points
        ]
        for points in (cards.perplexities, cards.mauves)
    )
    panels = [points for points in (perplexities, mauves) if points]
    models = {point.series: point.model for point in (*perplexities, *mauves)}
    colour_of_model = dict(zip(dict.fromkeys(models.values()), cycle(COLOURS), strict=False))
    colours = {series: colour_of_model[model] for series, model in models.items()}
    caption = "".join(f"{option} throughout; " for option in sorted(common)) + "bars: standard errors over samples"
    caption += "; of MAUVE, the spread over k-means seeds" if mauves else ""
    if any(all(point.comparable for point in points) for points in panels):
        caption += f"; open diamonds: published ({cards.source}), with no error"
    notes = _comparability_notes(perplexities, "judges") + _comparability_notes(mauves, "featurisers")
    with _literal_text():
        figure, width = new_figure(5.6 * len(panels), 4.4), 80 * len(panels)  # in characters
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        figure.supxlabel(textwrap.fill(caption, width), fontsize=SMALL, color=GREY)
        figure.suptitle("\n".join(textwrap.fill(each, width) for each in notes), fontsize=SMALL, color=WARNING)
        if perplexities:
            _draw_perplexities(all_axes[0], replace(cards, perplexities=perplexities), colours)
        if mauves:
            _draw_mauves(all_axes[-1], replace(cards, mauves=mauves), colours)
        save_figure(figure, path)


def _comparability_notes(points: Sequence[CardPoint], what: str) -> list[str]:
    """Which points are not comparable with each other or with published metrics."""
    judges = sorted({point.judge for point in points})
    differ = f"{what} differ ({', '.join(judges)}): points with different ones are not comparable"
    return [differ] * (len(judges) > 1) + list(dict.fromkeys(point.label for point in points if point.label))


def _draw_perplexities(axes: Any, cards: CardPoints, colours: Mapping[str, str]) -> None:
    points, references = cards.perplexities, cards.references
    _style_axes(axes)
    axes.set_xlabel("unigram entropy of a sample, nats (more varied to the right)", fontsize=9)
    axes.set_ylabel(f"generative perplexity{_name_judge(points)}", fontsize=9)
    curves = _draw_curves(axes, points, colours)
    for point in references:
        axes.errorbar(*point.xy, *point.errors[::-1], marker="*", markersize=10, color=INK, linewidth=1)
    published = [
        ((row.figures["entropy"], row.figures["gen-ppl"]), row, _colour_of(row, points, colours))
        for row in _comparable_rows(cards, points, "data")
    ]
    for xy, _, colour in published:
        axes.plot(*xy, color=colour, **PUBLISHED)
    single = [*(point.xy for point in references), *(xy for xy, _, _ in published)]
    heights = [y for _, y in (*single, *(point.xy for point in points))]
    if max(heights) > 3 * min(heights):
        _logarithmic(axes, "y", max(heights) / min(heights))
    axes.margins(0.09)
    labels = LabelPlacer(axes, [*curves.values(), *_bars(points), *(np.array([xy]) for xy in single)])
    by_judge = {point.judge: point for point in references}
    for judge, point in by_judge.items():
        labels.put([point.xy], "reference" if len(by_judge) == 1 else f"reference [{Path(judge).name}]")
    _label_curves(labels, curves, points, colours)
    # sampling steps: at the ends of each curve first, at the other points where there is space
    small, with_steps = {"fontsize": SMALL - 1}, [(point, point.steps) for point in points if point.steps is not None]
    by_series = {series: [steps for point, steps in with_steps if point.series == series] for series in colours}
    ends = [each for each in with_steps if each[1] in (min(by_series[each[0].series]), max(by_series[each[0].series]))]
    for point, steps in ends:
        labels.put([point.xy], f"{steps:,} steps", near=2, color=colours[point.series], **small)
    for point, steps in with_steps:
        if (point, steps) not in ends and not labels.crowded(point.xy, [other.xy for other, _ in with_steps]):
            labels.put([point.xy], f"{steps:,}", near=1, color=colours[point.series], **small)
    for xy, row, colour in published:
        if row.method == "data" and not references:
            labels.put([xy], row.title, color=GREY)
        elif row.steps not in {None, *(point.steps for point in points if colours[point.series] == colour)}:
            labels.put([xy], f"{row.steps:,}", near=1, color=colour, style="italic", **small)


def _draw_mauves(axes: Any, cards: CardPoints, colours: Mapping[str, str]) -> None:
    points = cards.mauves
    _style_axes(axes)
    axes.set_ylabel(f"MAUVE{_name_judge(points)}", fontsize=9)
    with_steps = [point for point in points if point.steps is not None]
    published = [(row.steps, row) for row in _comparable_rows(cards, points) if row.steps is not None]
    steps = sorted({int(point.xy[0]) for point in with_steps} | {each for each, _ in published}) or [1]
    curves = _draw_curves(axes, with_steps, colours)
    for x, row in published:
        axes.plot(x, row.figures["mauve"], color=_colour_of(row, points, colours), **PUBLISHED)
    axes.set_xlabel("sampling steps", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{each:,}" for each in steps])
    axes.minorticks_off()
    axes.set_xlim(steps[0] / 1.35, steps[-1] * 1.35)
    axes.set_ylim(0, min(1.02, 1.12 * max(point.xy[1] + point.errors[1] for point in points)))
    edges = axes.get_xlim()
    levels = {}
    for point in (each for each in points if each.steps is None):
        value, error, colour = point.xy[1], point.errors[1], colours[point.series]
        axes.axhspan(value - error, value + error, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(value, color=colour, linewidth=1.2, linestyle=(0, (5, 2)))
        levels[point.series] = np.array([(x, value) for x in (edges[0], *steps, edges[1])])
    labels = LabelPlacer(axes, [*curves.values(), *_bars(with_steps), *levels.values()])
    for series, level in levels.items():
        labels.put([tuple(xy) for xy in level[1:-1]], f"{series}, in as many steps as tokens", color=colours[series])
    _label_curves(labels, curves, with_steps, colours)


def _name_judge(points: Sequence[CardPoint]) -> str:
    """The judge in parentheses, if there is only one."""
    judges = {point.judge for point in points}
    return f" ({Path(judges.pop()).name})" if len(judges) == 1 else ""


def _draw_curves(axes: Any, points: Sequence[CardPoint], colours: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    """The curves (n, 2) by series and judge, most steps first; one marker per judge or featuriser."""
    markers = dict(zip(dict.fromkeys(point.judge for point in points), cycle(MARKERS), strict=False))
    curves = {}
    for series, judge in dict.fromkeys((point.series, point.judge) for point in points):
        members = [point for point in points if (point.series, point.judge) == (series, judge)]
        members.sort(key=lambda point: point.steps or 0)
        xy, errors = np.array([point.xy for point in members]), np.array([point.errors for point in members])
        style = {"color": colours[series], "marker": markers[judge], "markersize": 5, "markeredgewidth": 0}
        bars = {"xerr": errors[:, 0], "yerr": errors[:, 1], "elinewidth": 1, "capsize": 2, "capthick": 1}
        same_colour = [other for other in colours if colours[other] == colours[series]]
        line = LINE_STYLES[same_colour.index(series) % len(LINE_STYLES)]
        _, _, errorbars = axes.errorbar(*xy.T, linewidth=1.4, linestyle=line, **bars, **style)
        for errorbar in errorbars:
            errorbar.set_linestyle("-")
        curves[series, judge] = xy[::-1]
    return curves


def _bars(points: Sequence[CardPoint]) -> Iterator[Any]:
    """The error bars, as curves that no label may cover."""
    for (x, y), (x_error, y_error) in ((point.xy, point.errors) for point in points):
        yield np.array([(x - x_error, y), (x + x_error, y)])
        yield np.array([(x, y - y_error), (x, y + y_error)])


def _label_curves(
    labels: LabelPlacer, curves: Mapping[tuple[str, str], Any], points: Sequence[CardPoint], colours: Mapping[str, str]
) -> None:
    """Label each curve with its series, and with its judge where there are several."""
    several_judges = len({point.judge for point in points}) > 1
    for (series, judge), curve in curves.items():
        name = f"{series} [{Path(judge).name}]" if several_judges else series
        labels.put([tuple(point) for point in curve], name, color=colours[series], fontweight="bold")


def _comparable_rows(cards: CardPoints, points: Sequence[CardPoint], *more_methods: str) -> list[PublishedPoint]:
    """Published rows of the methods in the plot; none unless all cards are comparable with them."""
    methods = {*more_methods, *(point.method for point in points)}
    return [row for row in cards.published if row.method in methods and all(point.comparable for point in points)]


def _colour_of(row: PublishedPoint, points: Sequence[CardPoint], colours: Mapping[str, str]) -> str:
    """The colour of our series of the same method, and of the same sampler where there is one."""
    of_method = [point.series for point in points if point.method == row.method]
    of_sampler = [series for series in of_method if f", {row.sampler}" in series]
    return colours[(of_sampler or of_method)[0]] if of_method else GREY


# Published results of a table with ours: one line per result, one panel per unit. Next to a result of ours that is not
# comparable, the published one is pale.

VERDICTS = {
    "agrees": ("o", "#009e73"),
    "differs": ("s", "#d55e00"),
    "undecided": ("^", "#e69f00"),
    "not comparable": ("X", GREY),
}
"""Marker and colour of ours, by verdict."""
TALL, SHORT = 0.42, 0.25  # height in inches of a line with a model of ours, and of one without


class ComparedResult(NamedTuple):
    """A published result, and ours where there is one."""

    line: str
    """The label at the left; results with the same label share a line. The model of ours is on its second line."""
    unit: str
    published: float
    verdict: str
    ours: float | None
    bar: float | None
    """How far ours may be from the published one to agree."""
    note: str
    """At the right of the line, if there is one panel."""


def plot_reproduction(title: str, caption: str, results: Sequence[ComparedResult], path: Path) -> None:
    units, bottom = list(dict.fromkeys(each.unit for each in results)), 0.0
    heights: dict[str, float] = {}  # distance of each line from the top, in inches
    for line in dict.fromkeys(each.line for each in results):
        height = TALL if "\n" in line else SHORT
        heights[line], bottom = bottom + height / 2, bottom + height
    bottom = max(heights.values()) + SHORT
    with _literal_text():
        figure = new_figure(7.5 if len(units) == 1 else 1.6 + 3.1 * len(units), 1.1 + bottom)
        all_axes = figure.subplots(1, len(units), squeeze=False, sharey=True)[0]
        for axes, unit in zip(all_axes, units, strict=True):
            _style_axes(axes, grid="x")
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(unit, fontsize=9)
            _draw_compared(axes, [(each, heights[each.line]) for each in results if each.unit == unit])
        all_axes[0].set_yticks(list(heights.values()), list(heights), fontsize=SMALL)
        all_axes[0].set_ylim(bottom, 0)
        if len(units) == 1:
            position = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
            for each in (each for each in results if each.ours is not None):
                style = {"fontsize": SMALL, "color": VERDICTS[each.verdict][1]}
                all_axes[0].annotate(each.note, (1.01, heights[each.line]), **style, **position)
        else:  # several panels have no space for notes
            labelled = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in all_axes]
            handles = {name: handle for pairs in labelled for handle, name in pairs}
            if handles:
                place = {"loc": "outside upper right", "ncols": len(handles), "fontsize": SMALL, "frameon": False}
                figure.legend(handles.values(), handles.keys(), **place)
        figure.suptitle(title, fontsize=10)
        figure.supxlabel(caption, fontsize=SMALL, color=GREY)
        save_figure(figure, path)


def _draw_compared(axes: Any, panel: Sequence[tuple[ComparedResult, float]]) -> None:
    values = [value for each, _ in panel for value in (each.published, each.ours) if value is not None]
    if all("perplexity" in each.unit for each, _ in panel) and max(values) > 4 * min(values):
        _logarithmic(axes, "x", max(values) / min(values))
    for each, y in panel:
        colour = PALE if each.verdict == "not comparable" else INK
        axes.plot(each.published, y, color=colour, zorder=3, **PUBLISHED)
        if each.ours is not None:
            marker, colour = VERDICTS[each.verdict]
            style = {"fmt": marker, "markersize": 5, "capsize": 2, "elinewidth": 1.2, "color": colour}
            axes.errorbar(each.ours, y, xerr=each.bar, label=f"ours, {each.verdict}", **style)
    axes.margins(x=0.08)


# Training curves, from metrics.jsonl.

Lines = Sequence[Mapping[str, Any]]
"""The lines of a metrics.jsonl."""
NATS_LABEL = "nats per token, without the anchor term"


def plot_runs(runs: Sequence[Path], report: Callable[[str], None] = lambda message: None) -> list[Path]:
    """Write curves.png and .svg into a run's folder; for several runs, comparison.png and .svg into the first's."""
    _require_matplotlib()
    curves: dict[str, Lines] = {}
    for run in runs:
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"{run} has no metrics.jsonl, so it is not a run of `adlm train`")
        curves[str(run)], num_damaged = scan_metrics(path)
        if num_damaged:
            report(f"{path} has {num_damaged} damaged line(s), which are left out")
        if not curves[str(run)]:
            raise UserError(f"{path} is empty; wait for the first logged step")
    if len(curves) > 1:
        name, figure = "comparison", _draw_comparison(curves)
    else:
        name, figure = "curves", _draw_run(curves[str(runs[0])], runs[0].name)
    paths = [runs[0] / f"{name}.png", runs[0] / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path, dpi=120)
    return paths


def _draw_comparison(curves: Mapping[str, Lines]) -> Any:
    """Nats of all runs in one plot, one colour each: validation as points, training as a faint line."""
    figure = new_figure(9, 5.5)
    axes = figure.subplots()
    for number, (name, lines) in enumerate(curves.items()):
        colour = f"C{number % 10}"
        _draw_metric(axes, lines, "nats", f"{name}, in training", colour, 0.35)
        _draw_validation(axes, lines, f"{name}, held out", colour)
    axes.set_xlabel("step")
    axes.set_ylabel(NATS_LABEL)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_run(lines: Lines, title: str) -> Any:
    figure = new_figure(11, 7)
    figure.suptitle(title)
    (nats, anchor), (norm, speed) = figure.subplots(2, 2)
    _draw_metric(nats, lines, "nats", "in training")
    _draw_validation(nats, lines, "held out, with its standard error", "tab:orange")
    nats.set_ylabel(NATS_LABEL)
    nats.legend()
    if any("anchor" in line for line in lines):
        _draw_metric(anchor, lines, "anchor", "anchor cross-entropy")
        anchor.set_ylabel("anchor term before gamma, nats per token")
    else:
        _draw_metric(anchor, lines, "valid_perplexity", "perplexity")
        anchor.set_ylabel("perplexity of held-out text")
        anchor.set_yscale("log")
    _draw_metric(norm, lines, "gradient_norm", "gradient norm")
    norm.set_ylabel("gradient norm before clipping")
    norm.set_yscale("log")
    rate = norm.twinx()
    _draw_metric(rate, lines, "learning_rate", "learning rate", colour="tab:orange")
    rate.set_ylabel("learning rate")
    _draw_metric(speed, lines, "tokens_per_second", "tokens per second")
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    for axes in (nats, anchor, norm, speed):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return figure


def _points(lines: Lines, x: str, y: str) -> list[tuple[float, float]]:
    return [(line[x], line[y]) for line in lines if line.get(y) is not None]


def _draw_metric(axes: Any, lines: Lines, name: str, label: str, colour: str = "tab:blue", alpha: float = 1.0) -> None:
    points = _points(lines, "step", name)
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, label=label, color=colour, alpha=alpha, linewidth=1.2)


def _draw_validation(axes: Any, lines: Lines, label: str, colour: str) -> None:
    if points := _points(lines, "step", "valid_nats"):
        errors = [line.get("valid_stderr") or 0.0 for line in lines if line.get("valid_nats") is not None]
        style = {"color": colour, "marker": "o", "markersize": 3, "capsize": 2}
        axes.errorbar(*zip(*points, strict=True), errors, label=label, **style)


# The loss chart of the quickstart's page.

LEFT, RIGHT, TOP, BOTTOM = 34, 68, 26, 44  # margins in pixels, for the labels of the axes and of the levels
SPACE = 0.06  # of the height, above the highest and below the lowest value


def draw_loss_chart(curves: Mapping[str, Lines], levels: Mapping[str, float], width: int, height: int) -> str:
    """Training loss (faint) and held-out bound (points) of each run by training tokens, and levels to compare with.

    SVG; the elements of a run have the class `line-NAME`.
    """
    in_training, held_out = (
        {name: _points(lines, "tokens", metric) for name, lines in curves.items()} for metric in ("nats", "valid_nats")
    )
    points = [point for runs in (in_training, held_out) for run in runs.values() for point in run]
    values = [nats for _, nats in points] + list(levels.values())
    space = max(max(values) - min(values), 0.1) * SPACE
    low, high, most = min(values) - space, max(values) + space, max((tokens for tokens, _ in points), default=1)
    right, bottom = width - RIGHT, height - BOTTOM

    def x(tokens: float) -> float:
        return LEFT + (right - LEFT) * tokens / most

    def y(nats: float) -> float:
        return TOP + (bottom - TOP) * (high - nats) / (high - low)

    def text(label: str, at_x: float, at_y: float, anchor: str = "start") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{html.escape(label)}</text>'

    def level(kind: str, at_y: float) -> str:
        return f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{at_y:.1f}" y2="{at_y:.1f}"/>'

    def polyline(kind: str, run: Sequence[tuple[float, float]]) -> str:
        corners = " ".join(f"{x(tokens):.1f},{y(nats):.1f}" for tokens, nats in run)
        return f'<polyline class="{kind}" points="{corners}"/>'

    names = ", ".join(name.upper() for name in curves)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{html.escape(f"Loss of {names} in nats per token, by training tokens")}">'
    ]
    for nats in _ticks(low, high, (bottom - TOP) // 45):
        parts += [level("grid", y(nats)), text(f"{nats:g}", LEFT - 8, y(nats) + 4, "end")]
    parts += [
        text(_thousands(tokens), x(tokens), bottom + 18, "middle") for tokens in _ticks(0, most, (right - LEFT) // 60)
    ]
    parts += [level("axis", bottom), text("nats per token", 0, 12)]
    parts.append(text("training tokens", (LEFT + right) / 2, bottom + 38, "middle"))
    for name, nats in levels.items():
        parts += [level("level", y(nats)), text(name, right + 6, y(nats) + 4)]
    parts += [polyline(f"line-{name} training", run) for name, run in in_training.items()]
    for name, run in held_out.items():
        parts.append(polyline(f"line-{name}", run))
        parts += [
            f'<circle class="line-{name}" cx="{x(tokens):.1f}" cy="{y(nats):.1f}" r="3.5">'
            f"<title>{name.upper()} after {tokens:,} tokens: {nats:.4f} nats per held-out token</title></circle>"
            for tokens, nats in run
        ]
    return "".join([*parts, "</svg>"])


def _ticks(lowest: float, highest: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers from `lowest` to `highest`, evenly spaced by 1, 2 or 5 times a power of ten."""
    rough = (highest - lowest) / max(most, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _thousands(number: float) -> str:
    """1.5M, 800k, 64."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
