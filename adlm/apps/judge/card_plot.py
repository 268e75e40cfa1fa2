"""Plots of metric cards: generative perplexity against entropy, and MAUVE against sampling steps. Computes no metrics.

Cards of one model and sampler form a curve in the order of their steps, with one colour per model and one line style
per sampler. Published metrics are drawn only on a panel whose cards are all comparable with them.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from adlm.apps.judge.card import Card
from adlm.apps.paper.published_tables import PAPER, TABLES, PublishedRow
from adlm.apps.paper.results import is_causal, results_of
from adlm.apps.plots import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    WARNING,
    LabelPlacer,
    check_plot_path,
    literal_text,
    logarithmic,
    new_figure,
    save_figure,
    style_axes,
)
from adlm.errors import UserError, printable

MARKERS = "osD^vPX"
LINE_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
DEFAULTS = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}  # options with other values are named in the plot
SPREAD = "; of MAUVE, the spread over k-means seeds"
GENERATION = TABLES["generation"]


@dataclass(frozen=True)
class Point:
    """The point of a card on a panel."""

    series: str
    """Model and sampler, with the sampling options in which the cards differ."""
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
    comparable: bool


def plot_cards(cards: Mapping[str, Card], path: Path, force: bool = False) -> None:
    """Plot cards, given by file name, with a panel for each pair of metrics that some of them have."""
    check_plot_path(path, "--out", force, [Path(name) for name in cards])
    perplexities: list[Point] = []
    mauves: list[Point] = []
    references: list[Point] = []
    for name, card in cards.items():
        try:
            perplexities += _perplexity_point(card, name)
            mauves += _mauve_point(card, name)
            references += _reference_point(card)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"{name} is not a complete card ({type(error).__name__}: {error}); make it again") from None
    if not perplexities and not mauves:
        raise UserError("none of the cards has perplexity and entropy, or MAUVE: there is nothing to draw")
    common = set.intersection(*(set(point.options) for point in (*perplexities, *mauves)))
    perplexities, mauves = ([_name_options(point, common) for point in points] for points in (perplexities, mauves))
    with literal_text():
        save_figure(_draw(perplexities, mauves, references, sorted(common)), path)


def _name_options(point: Point, common: set[str]) -> Point:
    """The point with the options that not all cards share in the name of its series."""
    return replace(point, series=", ".join([point.series, *(each for each in point.options if each not in common)]))


def _perplexity_point(card: Card, name: str) -> Iterator[Point]:
    if not _has_perplexity(card):
        return
    xy, errors = _entropy_and_perplexity(card)
    yield Point(
        **_describe_samples(card),
        judge=_text(card["perplexity"]["judge"]["name"]),
        xy=xy,
        errors=errors,
        label=card["perplexity"]["label"] and _text(card["perplexity"]["label"]),
        comparable=_comparable(card, name, ("gen-ppl", "entropy")),
    )


def _mauve_point(card: Card, name: str) -> Iterator[Point]:
    if "mauve" not in card:
        return
    mauve, samples = card["mauve"], _describe_samples(card)
    yield Point(
        **samples,
        judge=_text(mauve["featuriser"]["name"]),
        xy=(float(samples["steps"] or math.nan), _number(mauve["value"])),
        errors=(0.0, _number(mauve["spread"] or 0.0)),
        label=mauve["label"] and _text(mauve["label"]),
        comparable=_comparable(card, name, ("mauve",)),
    )


def _reference_point(card: Card) -> Iterator[Point]:
    """The reference texts, where they were judged too."""
    metrics = card.get("reference_judged", {})
    if _has_perplexity(metrics):
        judge, (xy, errors) = _text(metrics["perplexity"]["judge"]["name"]), _entropy_and_perplexity(metrics)
        yield Point("reference", "", (), "data", None, judge, xy, errors, label=None, comparable=False)


def _describe_samples(card: Card) -> dict[str, Any]:
    made_by, sampling = card["samples"]["made_by"], card["samples"]["made_by"]["sampling"]
    name, method = Path(_text(made_by["model"])).name, _text(made_by["method"])
    causal = is_causal(method)
    model = name if method in name.lower() else f"{name} ({method})"
    return {
        "series": model if causal else f"{model}, {_text(sampling['sampler'])}",
        "model": model,
        "options": tuple(
            f"{option} {sampling[option]:g}" for option, default in DEFAULTS.items() if sampling[option] != default
        ),
        "method": method,
        "steps": None if causal else int(sampling["steps"]),
    }


def _has_perplexity(metrics: Mapping[str, Any]) -> bool:
    if not {"perplexity", "entropy"} <= metrics.keys():
        return False
    return metrics["perplexity"]["pooled"]["value"] is not None and metrics["entropy"]["value"] is not None


def _entropy_and_perplexity(metrics: Mapping[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two values, and their standard errors."""
    entropy, pooled = metrics["entropy"], metrics["perplexity"]["pooled"]
    values = _number(entropy["value"]), _number(pooled["value"])
    return values, (_number(entropy["stderr"] or 0.0), _number(pooled["stderr"] or 0.0))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return printable(value)


def _number(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number")
    return float(value)


def _comparable(card: Card, name: str, columns: Sequence[str]) -> bool:
    results = [each for each in results_of(card, GENERATION, name) if each.method != "data" and each.column in columns]
    return not any(result.incomparable for result in results)


def _draw(perplexities: list[Point], mauves: list[Point], references: list[Point], common: list[str]) -> Any:
    panels = [points for points in (perplexities, mauves) if points]
    figure = new_figure(5.6 * len(panels), 4.4)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    models = {point.series: point.model for point in (*perplexities, *mauves)}
    colour_of_model = dict(zip(dict.fromkeys(models.values()), cycle(COLOURS), strict=False))
    colours = {series: colour_of_model[model] for series, model in models.items()}
    warnings = _warnings(perplexities, "judges") + _warnings(mauves, "featurisers")
    caption = "".join(f"{option} throughout; " for option in common)
    caption += "bars: standard errors over samples" + (SPREAD if mauves else "")
    if any(all(point.comparable for point in points) for points in panels):
        caption += f"; open diamonds: published ({PAPER}), with no error"
    width = 80 * len(panels)  # characters
    figure.supxlabel(textwrap.fill(caption, width), fontsize=SMALL, color=GREY)
    figure.suptitle("\n".join(textwrap.fill(each, width) for each in warnings), fontsize=SMALL, color=WARNING)
    if perplexities:
        _draw_perplexities(all_axes[0], perplexities, references, colours)
    if mauves:
        _draw_mauves(all_axes[-1], mauves, colours)
    return figure


def _draw_perplexities(axes: Any, points: list[Point], references: list[Point], colours: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_xlabel("unigram entropy of a sample, nats (more varied to the right)", fontsize=9)
    axes.set_ylabel(f"generative perplexity{_name_judge(points)}", fontsize=9)
    curves = _draw_curves(axes, points, colours)
    for point in references:
        axes.errorbar(*point.xy, *point.errors[::-1], marker="*", markersize=10, color=INK, linewidth=1)
    published = [((row.figures["entropy"], row.figures["gen-ppl"]), row) for row in _published(points, data=True)]
    for xy, row in published:
        axes.plot(*xy, "D", markersize=6, fillstyle="none", color=_colour_of(row, points, colours))
    single = [*(point.xy for point in references), *(xy for xy, _ in published)]
    heights = [y for _, y in (*single, *(point.xy for point in points))]
    if max(heights) > 3 * min(heights):
        logarithmic(axes, "y", max(heights) / min(heights))
    axes.margins(0.09)
    labels = LabelPlacer(axes, [*curves.values(), *_bars(points), *(np.array([xy]) for xy in single)])
    by_judge = {point.judge: point for point in references}
    for judge, point in by_judge.items():
        labels.put([point.xy], "reference" if len(by_judge) == 1 else f"reference [{Path(judge).name}]", color=INK)
    _label_curves(labels, curves, points, colours)
    _label_steps(labels, points, colours)
    for xy, row in published:
        colour, steps = _colour_of(row, points, colours), row.options.get("steps")
        if row.method == "data" and not references:
            labels.put([xy], row.title, color=GREY)
        elif steps not in {None, *(point.steps for point in points if colours[point.series] == colour)}:
            labels.put([xy], f"{steps:,}", near=1, color=colour, fontsize=SMALL - 1, style="italic")


def _draw_mauves(axes: Any, points: list[Point], colours: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_ylabel(f"MAUVE{_name_judge(points)}", fontsize=9)
    with_steps = [point for point in points if point.steps is not None]
    rows = [row for row in _published(points) if "steps" in row.options]
    steps = sorted({int(point.xy[0]) for point in with_steps} | {int(row.options["steps"]) for row in rows}) or [1]
    curves = _draw_curves(axes, with_steps, colours)
    for row in rows:
        colour = _colour_of(row, points, colours)
        axes.plot(int(row.options["steps"]), row.figures["mauve"], "D", markersize=6, fillstyle="none", color=colour)
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


def _draw_curves(axes: Any, points: Sequence[Point], colours: Mapping[str, str]) -> dict[tuple[str, str], Any]:
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


def _bars(points: Sequence[Point]) -> Iterator[Any]:
    """The error bars, as curves that no label may cover."""
    for (x, y), (x_error, y_error) in ((point.xy, point.errors) for point in points):
        yield np.array([(x - x_error, y), (x + x_error, y)])
        yield np.array([(x, y - y_error), (x, y + y_error)])


def _label_curves(
    labels: LabelPlacer, curves: Mapping[tuple[str, str], Any], points: Sequence[Point], colours: Mapping[str, str]
) -> None:
    """Label each curve with its series, and with its judge where there are several."""
    several_judges = len({point.judge for point in points}) > 1
    for (series, judge), curve in curves.items():
        name = f"{series} [{Path(judge).name}]" if several_judges else series
        labels.put([tuple(point) for point in curve], name, color=colours[series], fontweight="bold")


def _label_steps(labels: LabelPlacer, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    """Label points with their sampling steps: the ends of each curve first, the others where there is space."""
    with_steps = [(point, point.steps) for point in points if point.steps is not None]
    by_series = {series: [steps for point, steps in with_steps if point.series == series] for series in colours}
    ends = [
        (point, steps)
        for point, steps in with_steps
        if steps in (min(by_series[point.series]), max(by_series[point.series]))
    ]
    style = {"fontsize": SMALL - 1}
    for point, steps in ends:
        labels.put([point.xy], f"{steps:,} steps", near=2, color=colours[point.series], **style)
    for point, steps in with_steps:
        if (point, steps) not in ends and not labels.crowded(point.xy, [other.xy for other, _ in with_steps]):
            labels.put([point.xy], f"{steps:,}", near=1, color=colours[point.series], **style)


def _published(points: Sequence[Point], data: bool = False) -> list[PublishedRow]:
    """Published rows of the methods in the plot; none unless all cards are comparable with them."""
    if not all(point.comparable for point in points):
        return []
    methods = {point.method for point in points} | ({"data"} if data else set())
    return [row for row in GENERATION.rows if row.method in methods]


def _colour_of(row: PublishedRow, points: Sequence[Point], colours: Mapping[str, str]) -> str:
    """The colour of our series of the same method, and of the same sampler where there is one."""
    of_method = [point.series for point in points if point.method == row.method]
    sampler = str(row.options.get("sampler", ""))
    of_sampler = [series for series in of_method if f", {sampler}" in series]
    return colours[(of_sampler or of_method)[0]] if of_method else GREY


def _name_judge(points: Sequence[Point]) -> str:
    """The judge in parentheses, if there is only one."""
    judges = {point.judge for point in points}
    return f" ({Path(judges.pop()).name})" if len(judges) == 1 else ""


def _warnings(points: Sequence[Point], what: str) -> list[str]:
    """Which points are not comparable with each other or with published metrics."""
    judges = sorted({point.judge for point in points})
    differ = f"{what} differ ({', '.join(judges)}): points with different ones are not comparable"
    return [differ] * (len(judges) > 1) + list(dict.fromkeys(point.label for point in points if point.label))
