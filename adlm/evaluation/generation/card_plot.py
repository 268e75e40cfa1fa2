"""Cards as a picture: perplexity against entropy, MAUVE against steps. Knows nothing of how the figures came about.

Cards of one model and sampler are joined in the order of their steps: a colour for a model, a kind of line for a
sampler. Published figures stand beside ours only on a
panel of which every card may be set beside them.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from adlm.errors import UserError, printable
from adlm.evaluation.generation.card import Card
from adlm.evaluation.paper.published_tables import PAPER, TABLES, PublishedRow
from adlm.evaluation.paper.results import LEFT_TO_RIGHT, results_of
from adlm.evaluation.plotting import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    WARNING,
    Labels,
    check_plot_path,
    literal_text,
    logarithmic,
    new_figure,
    save_figure,
    style_axes,
)

MARKERS = "osD^vPX"
LINES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
PLAIN = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}  # what samples are made with unless a label says otherwise
SPREAD = "; of MAUVE, the spread over k-means seeds"
GENERATION = TABLES["generation"]


@dataclass(frozen=True)
class Point:
    """A card on a panel."""

    maker: str
    """Model and sampler, and the knobs that tell them apart from another's."""
    model: str
    knobs: tuple[str, ...]
    """Of the sampler, those that are not as usual."""
    method: str
    steps: int | None
    """None where one token follows the other, however many."""
    by: str
    """Whose figure it is: a judge's, or a featuriser's."""
    at: tuple[float, float]
    """Across and up."""
    errors: tuple[float, float]
    label: str | None
    comparable: bool


def plot_cards(cards: Mapping[str, Card], path: Path, force: bool = False) -> None:
    """The cards by the names of their files; a panel for what some of them have."""
    check_plot_path(path, "--out", force, [Path(name) for name in cards])
    judged: list[Point] = []
    compared: list[Point] = []
    references: list[Point] = []
    for name, card in cards.items():
        try:
            judged += _judged(card, name)
            compared += _compared(card, name)
            references += _reference(card)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"{name} is no whole card ({type(error).__name__}: {error}); make it again") from None
    if not judged and not compared:
        raise UserError("none of the cards has perplexity and entropy, or MAUVE: there is nothing to draw")
    common = set.intersection(*(set(point.knobs) for point in (*judged, *compared)))
    judged, compared = ([_named_apart(point, common) for point in points] for points in (judged, compared))
    with literal_text():
        save_figure(_drawn(judged, compared, references, sorted(common)), path)


def _named_apart(point: Point, common: set[str]) -> Point:
    return replace(point, maker=", ".join([point.maker, *(knob for knob in point.knobs if knob not in common)]))


def _judged(card: Card, name: str) -> Iterator[Point]:
    if not _has_point(card):
        return
    at, errors = _at(card)
    yield Point(
        **_made(card),
        by=_words(card["perplexity"]["judge"]["name"]),
        at=at,
        errors=errors,
        label=card["perplexity"]["label"] and _words(card["perplexity"]["label"]),
        comparable=_comparable(card, name, ("gen-ppl", "entropy")),
    )


def _compared(card: Card, name: str) -> Iterator[Point]:
    if "mauve" not in card:
        return
    mauve, made = card["mauve"], _made(card)
    yield Point(
        **made,
        by=_words(mauve["featuriser"]["name"]),
        at=(float(made["steps"] or math.nan), _number(mauve["value"])),
        errors=(0.0, _number(mauve["spread"] or 0.0)),
        label=mauve["label"] and _words(mauve["label"]),
        comparable=_comparable(card, name, ("mauve",)),
    )


def _reference(card: Card) -> Iterator[Point]:
    """The texts that the samples were compared with, where they were judged too."""
    figures = card.get("reference_judged", {})
    if _has_point(figures):
        judge = _words(figures["perplexity"]["judge"]["name"])
        yield Point("reference", "", (), "data", None, judge, *_at(figures), label=None, comparable=False)


def _made(card: Card) -> dict[str, Any]:
    made_by, sampling = card["samples"]["made_by"], card["samples"]["made_by"]["sampling"]
    name, method = Path(_words(made_by["model"])).name, _words(made_by["method"])
    alone = method in LEFT_TO_RIGHT
    model = name if method in name.lower() else f"{name} ({method})"
    return {
        "maker": model if alone else f"{model}, {_words(sampling['sampler'])}",
        "model": model,
        "knobs": tuple(f"{knob} {sampling[knob]:g}" for knob, usual in PLAIN.items() if sampling[knob] != usual),
        "method": method,
        "steps": None if alone else int(sampling["steps"]),
    }


def _has_point(figures: Mapping[str, Any]) -> bool:
    if not {"perplexity", "entropy"} <= figures.keys():
        return False
    return figures["perplexity"]["pooled"]["value"] is not None and figures["entropy"]["value"] is not None


def _at(figures: Mapping[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Entropy and perplexity, and their errors."""
    entropy, pooled = figures["entropy"], figures["perplexity"]["pooled"]
    values = _number(entropy["value"]), _number(pooled["value"])
    return values, (_number(entropy["stderr"] or 0.0), _number(pooled["stderr"] or 0.0))


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return printable(value)


def _number(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    return float(value)


def _comparable(card: Card, name: str, columns: Sequence[str]) -> bool:
    found = [each for each in results_of(card, GENERATION, name) if each.method != "data" and each.column in columns]
    return not any(each.incomparable for each in found)


def _drawn(judged: list[Point], compared: list[Point], references: list[Point], common: list[str]) -> Any:
    panels = [each for each in (judged, compared) if each]
    figure = new_figure(5.6 * len(panels), 4.4)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    models = {point.maker: point.model for point in (*judged, *compared)}
    of_model = dict(zip(dict.fromkeys(models.values()), cycle(COLOURS), strict=False))
    colours = {maker: of_model[model] for maker, model in models.items()}
    warnings = _warnings(judged, "judges") + _warnings(compared, "featurisers")
    told = "".join(f"{each} throughout; " for each in common)
    told += "bars: standard errors over samples" + (SPREAD if compared else "")
    if any(all(point.comparable for point in points) for points in panels):
        told += f"; open diamonds: published ({PAPER}), with no error"
    across = 80 * len(panels)  # characters
    figure.supxlabel(textwrap.fill(told, across), fontsize=SMALL, color=GREY)
    figure.suptitle("\n".join(textwrap.fill(each, across) for each in warnings), fontsize=SMALL, color=WARNING)
    if judged:
        _perplexities(every[0], judged, references, colours)
    if compared:
        _mauves(every[-1], compared, colours)
    return figure


def _perplexities(axes: Any, points: list[Point], references: list[Point], colours: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_xlabel("unigram entropy of a sample, nats (more varied to the right)", fontsize=9)
    axes.set_ylabel(f"generative perplexity{_one(points)}", fontsize=9)
    curves = _curves(axes, points, colours)
    for point in references:
        axes.errorbar(*point.at, *point.errors[::-1], marker="*", markersize=10, color=INK, linewidth=1)
    published = [((row.figures["entropy"], row.figures["gen-ppl"]), row) for row in _published(points, data=True)]
    for at, row in published:
        axes.plot(*at, "D", markersize=6, fillstyle="none", color=_colour_of(row, points, colours))
    alone = [*(point.at for point in references), *(at for at, _ in published)]
    heights = [up for _, up in (*alone, *(point.at for point in points))]
    if max(heights) > 3 * min(heights):
        logarithmic(axes, "y", max(heights) / min(heights))
    axes.margins(0.09)
    labels = Labels(axes, [*curves.values(), *_bars(points), *(np.array([at]) for at in alone)])
    judges = {point.by: point for point in references}
    for by, point in judges.items():
        labels.put([point.at], "reference" if len(judges) == 1 else f"reference [{Path(by).name}]", color=INK)
    _named(labels, curves, points, colours)
    _steps(labels, points, colours)
    for at, row in published:
        colour, steps = _colour_of(row, points, colours), row.knobs.get("steps")
        if row.method == "data" and not references:
            labels.put([at], row.title, color=GREY)
        elif steps not in {None, *(point.steps for point in points if colours[point.maker] == colour)}:
            labels.put([at], f"{steps:,}", near=1, color=colour, fontsize=SMALL - 1, style="italic")


def _mauves(axes: Any, points: list[Point], colours: Mapping[str, str]) -> None:
    style_axes(axes)
    axes.set_ylabel(f"MAUVE{_one(points)}", fontsize=9)
    walks = [point for point in points if point.steps is not None]
    rows = [row for row in _published(points) if "steps" in row.knobs]
    steps = sorted({int(point.at[0]) for point in walks} | {int(row.knobs["steps"]) for row in rows}) or [1]
    curves = _curves(axes, walks, colours)
    for row in rows:
        colour = _colour_of(row, points, colours)
        axes.plot(int(row.knobs["steps"]), row.figures["mauve"], "D", markersize=6, fillstyle="none", color=colour)
    axes.set_xlabel("sampling steps", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{each:,}" for each in steps])
    axes.minorticks_off()
    axes.set_xlim(steps[0] / 1.35, steps[-1] * 1.35)
    axes.set_ylim(0, min(1.02, 1.12 * max(point.at[1] + point.errors[1] for point in points)))
    edges = axes.get_xlim()
    levels = {}
    for point in (each for each in points if each.steps is None):
        value, error, colour = point.at[1], point.errors[1], colours[point.maker]
        axes.axhspan(value - error, value + error, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(value, color=colour, linewidth=1.2, linestyle=(0, (5, 2)))
        levels[point.maker] = np.array([(edge, value) for edge in (edges[0], *steps, edges[1])])
    labels = Labels(axes, [*curves.values(), *_bars(walks), *levels.values()])
    for maker, level in levels.items():
        labels.put([tuple(each) for each in level[1:-1]], f"{maker}, in as many steps as tokens", color=colours[maker])
    _named(labels, curves, walks, colours)


def _curves(axes: Any, points: Sequence[Point], colours: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    """One marker a judge or featuriser; (n, 2) of each, most steps first."""
    markers = dict(zip(dict.fromkeys(point.by for point in points), cycle(MARKERS), strict=False))
    curves = {}
    for maker, by in dict.fromkeys((point.maker, point.by) for point in points):
        series = [point for point in points if (point.maker, point.by) == (maker, by)]
        series.sort(key=lambda point: point.steps or 0)
        at, errors = np.array([point.at for point in series]), np.array([point.errors for point in series])
        style = {"color": colours[maker], "marker": markers[by], "markersize": 5, "markeredgewidth": 0}
        bars = {"xerr": errors[:, 0], "yerr": errors[:, 1], "elinewidth": 1, "capsize": 2, "capthick": 1}
        shared = [other for other in colours if colours[other] == colours[maker]]
        line = LINES[shared.index(maker) % len(LINES)]
        _, _, errorbars = axes.errorbar(*at.T, linewidth=1.4, linestyle=line, **bars, **style)
        for each in errorbars:
            each.set_linestyle("-")
        curves[maker, by] = at[::-1]
    return curves


def _bars(points: Sequence[Point]) -> Iterator[Any]:
    """The error bars, as curves that no label may cover."""
    for (x, y), (across, up) in ((point.at, point.errors) for point in points):
        yield np.array([(x - across, y), (x + across, y)])
        yield np.array([(x, y - up), (x, y + up)])


def _named(labels: Labels, curves: Mapping[tuple[str, str], Any], points: Sequence[Point], colours: Any) -> None:
    """Each curve's name beside it, with who measured it where several did."""
    several = len({point.by for point in points}) > 1
    for (maker, by), curve in curves.items():
        name = f"{maker} [{Path(by).name}]" if several else maker
        labels.put([tuple(point) for point in curve], name, color=colours[maker], fontweight="bold")


def _steps(labels: Labels, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    """How many steps a point was made in: the ends of each curve first, the others where there is room."""
    walks = [(point, point.steps) for point in points if point.steps is not None]
    of = {maker: [steps for point, steps in walks if point.maker == maker] for maker in colours}
    ends = [(point, steps) for point, steps in walks if steps in (min(of[point.maker]), max(of[point.maker]))]
    style = {"fontsize": SMALL - 1}
    for point, steps in ends:
        labels.put([point.at], f"{steps:,} steps", near=2, color=colours[point.maker], **style)
    for point, steps in walks:
        if (point, steps) not in ends and not labels.crowded(point.at, [other.at for other, _ in walks]):
            labels.put([point.at], f"{steps:,}", near=1, color=colours[point.maker], **style)


def _published(points: Sequence[Point], data: bool = False) -> list[PublishedRow]:
    """Rows of the paper's table of the methods that are drawn; none where one card may not stand beside them."""
    if not all(point.comparable for point in points):
        return []
    methods = {point.method for point in points} | ({"data"} if data else set())
    return [row for row in GENERATION.rows if row.method in methods]


def _colour_of(row: PublishedRow, points: Sequence[Point], colours: Mapping[str, str]) -> str:
    """Of ours that it is nearest to: the method's, with its sampler where that is drawn."""
    of_method = [point.maker for point in points if point.method == row.method]
    sampler = str(row.knobs.get("sampler", ""))
    alike = [maker for maker in of_method if f", {sampler}" in maker]
    return colours[(alike or of_method)[0]] if of_method else GREY


def _one(points: Sequence[Point]) -> str:
    """Who measured, where that is one."""
    who = {point.by for point in points}
    return f" ({Path(who.pop()).name})" if len(who) == 1 else ""


def _warnings(points: Sequence[Point], what: str) -> list[str]:
    """What may not be set beside what."""
    who = sorted({point.by for point in points})
    apart = f"{what} differ ({', '.join(who)}): points of one are not to be compared with another's"
    return [apart] * (len(who) > 1) + list(dict.fromkeys(point.label for point in points if point.label))
