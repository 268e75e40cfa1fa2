"""Cards as a picture: perplexity against entropy, MAUVE against steps. Knows nothing of how the figures came about.

Cards of one model and sampler are joined in the order of their steps. Published figures stand beside ours only on a
panel of which every card may be set beside them.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from adlm.errors import UserError
from adlm.evaluation.card import Card
from adlm.evaluation.findings import LEFT_TO_RIGHT, findings_of
from adlm.evaluation.picture import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    WARNING,
    Labels,
    blank,
    check_picture,
    logarithmic,
    plain,
    save,
)
from adlm.evaluation.published_tables import PAPER, TABLES, Row

MARKERS = "osD^vPX"
PLAIN = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}  # what samples are made with unless a label says otherwise
SPREAD = "; of MAUVE, the spread over k-means seeds"
GENERATION = TABLES["generation"]


@dataclass(frozen=True)
class Point:
    """A card on a panel."""

    maker: str
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


def plot(cards: Mapping[str, Card], path: Path) -> None:
    """The cards by the names of their files; a panel for what some of them have."""
    check_picture(path, "--out")
    judged: list[Point] = []
    compared: list[Point] = []
    references: list[Point] = []
    for name, card in cards.items():
        try:
            judged += _judged(card, name)
            compared += _compared(card, name)
            references += _reference(card)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{name} is no whole card ({type(error).__name__}: {error}); make it again") from None
    if not judged and not compared:
        raise UserError("none of the cards has perplexity and entropy, or MAUVE: there is nothing to draw")
    save(_drawn(judged, compared, references), path)


def _judged(card: Card, name: str) -> Iterator[Point]:
    if not _has_point(card):
        return
    perplexity, entropy = card["perplexity"], card["entropy"]
    yield Point(
        **_made(card),
        by=str(perplexity["judge"]["name"]),
        at=(_number(entropy["value"]), _number(perplexity["pooled"]["value"])),
        errors=(_number(entropy["stderr"] or 0.0), _number(perplexity["pooled"]["stderr"] or 0.0)),
        label=perplexity["label"],
        comparable=_comparable(card, name, ("gen-ppl", "entropy")),
    )


def _compared(card: Card, name: str) -> Iterator[Point]:
    if "mauve" not in card:
        return
    mauve, made = card["mauve"], _made(card)
    yield Point(
        **made,
        by=str(mauve["featuriser"]["name"]),
        at=(float(made["steps"] or math.nan), _number(mauve["value"])),
        errors=(0.0, _number(mauve["spread"] or 0.0)),
        label=mauve["label"],
        comparable=_comparable(card, name, ("mauve",)),
    )


def _reference(card: Card) -> Iterator[Point]:
    """The texts that the samples were compared with, where they were judged too."""
    figures = card.get("reference_judged", {})
    if _has_point(figures):
        judge, at = figures["perplexity"], (figures["entropy"], figures["perplexity"]["pooled"])
        value, error = (tuple(_number(each[what] or 0.0) for each in at) for what in ("value", "stderr"))
        yield Point("reference", "data", None, str(judge["judge"]["name"]), value, error, None, False)  # type: ignore[arg-type]


def _made(card: Card) -> dict[str, Any]:
    made_by, sampling = card["samples"]["made_by"], card["samples"]["made_by"]["sampling"]
    name, method = Path(made_by["model"]).name, made_by["method"]
    alone = method in LEFT_TO_RIGHT
    words = [name if method in name.lower() else f"{name} ({method})", *([] if alone else [sampling["sampler"]])]
    words += [f"{knob} {sampling[knob]:g}" for knob, plain_value in PLAIN.items() if sampling[knob] != plain_value]
    return {"maker": ", ".join(words), "method": method, "steps": None if alone else int(sampling["steps"])}


def _has_point(figures: Mapping[str, Any]) -> bool:
    if not {"perplexity", "entropy"} <= figures.keys():
        return False
    return figures["perplexity"]["pooled"]["value"] is not None and figures["entropy"]["value"] is not None


def _number(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    return float(value)


def _comparable(card: Card, name: str, columns: Sequence[str]) -> bool:
    found = [each for each in findings_of(card, GENERATION, name) if each.method != "data" and each.column in columns]
    return not any(each.incomparable for each in found)


def _drawn(judged: list[Point], compared: list[Point], references: list[Point]) -> Any:
    panels = [each for each in (judged, compared) if each]
    figure = blank(5.6 * len(panels), 4.4)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    colours = dict(
        zip(dict.fromkeys(point.maker for points in panels for point in points), cycle(COLOURS), strict=False)
    )
    warnings = _warnings(judged, "judges") + _warnings(compared, "featurisers")
    told = "bars: standard errors over samples" + (SPREAD if compared else "")
    if any(all(point.comparable for point in points) for points in panels):
        told += f"; open diamonds: published ({PAPER}), with no error"
    figure.supxlabel(textwrap.fill(told, 80 * len(panels)), fontsize=SMALL, color=GREY)
    figure.suptitle(
        "\n".join(textwrap.fill(each, 80 * len(panels)) for each in warnings), fontsize=SMALL, color=WARNING
    )
    for axes, points in zip(every, panels, strict=True):
        plain(axes)
        (_perplexities if points is judged else _mauves)(axes, points, references, colours)
    return figure


def _perplexities(axes: Any, points: list[Point], references: list[Point], colours: Mapping[str, str]) -> None:
    axes.set_xlabel("unigram entropy of a sample, nats (more varied to the right)", fontsize=9)
    axes.set_ylabel(f"generative perplexity{_one(points)}", fontsize=9)
    curves = _curves(axes, points, colours)
    for point in references:
        axes.errorbar(*point.at, *point.errors[::-1], marker="*", markersize=10, color=INK, linewidth=1)
    ours = [point.at for point in (*points, *references)]
    shown = [(row.figures["entropy"], row.figures["gen-ppl"], row) for row in _published(points, data=True)]
    for across, up, row in shown:
        axes.plot(across, up, "D", markersize=6, fillstyle="none", color=_colour_of(row, points, colours))
    heights = [up for _, up in ours] + [up for _, up, _ in shown]
    if max(heights) > 3 * min(heights):
        logarithmic(axes, "y")
    axes.margins(0.09)
    single = [
        np.array([(across, up)]) for across, up in [*(each.at for each in references), *(row[:2] for row in shown)]
    ]
    labels = Labels(axes, [*curves.values(), *_bars(points), *single])
    for point in _different(references, lambda each: each.by):
        several = len({each.by for each in references}) > 1
        labels.put([point.at], f"reference [{Path(point.by).name}]" if several else "reference", color=INK)
    for across, up, row in shown:
        if row.method == "data" and not references:
            labels.put([(across, up)], row.title, color=GREY)
    _named(labels, curves, points, colours)
    _steps(labels, points, colours)
    for across, up, row in shown:
        colour, steps = _colour_of(row, points, colours), row.knobs.get("steps")
        if steps not in {None, *(point.steps for point in points if colours[point.maker] == colour)}:
            labels.put([(across, up)], f"{steps:,}", near=1, color=colour, fontsize=SMALL - 1, style="italic")


def _mauves(axes: Any, points: list[Point], references: list[Point], colours: Mapping[str, str]) -> None:
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
    """One colour a model and sampler, one marker a judge or featuriser; (n, 2) of each, most steps first."""
    markers = dict(zip(dict.fromkeys(point.by for point in points), cycle(MARKERS), strict=False))
    curves = {}
    for maker, by in dict.fromkeys((point.maker, point.by) for point in points):
        series = [point for point in points if (point.maker, point.by) == (maker, by)]
        series.sort(key=lambda point: point.steps or 0)
        (x, y), (x_error, y_error) = (zip(*pairs, strict=True) for pairs in _pairs(series))
        style = {"color": colours[maker], "marker": markers[by], "markersize": 5, "markeredgewidth": 0}
        axes.errorbar(x, y, yerr=y_error, xerr=x_error, linewidth=1.4, elinewidth=1, capsize=2, capthick=1, **style)
        curves[maker, by] = np.array(list(zip(x, y, strict=True)))[::-1]
    return curves


def _bars(points: Sequence[Point]) -> Iterator[Any]:
    """The error bars, as curves that no label may cover."""
    for (x, y), (across, up) in ((point.at, point.errors) for point in points):
        yield np.array([(x - across, y), (x + across, y)])
        yield np.array([(x, y - up), (x, y + up)])


def _pairs(series: Sequence[Point]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return [point.at for point in series], [point.errors for point in series]


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


def _published(points: Sequence[Point], data: bool = False) -> list[Row]:
    """Rows of the paper's table of the methods that are drawn; none where one card may not stand beside them."""
    if not all(point.comparable for point in points):
        return []
    methods = {point.method for point in points} | ({"data"} if data else set())
    return [row for row in GENERATION.rows if row.method in methods]


def _colour_of(row: Row, points: Sequence[Point], colours: Mapping[str, str]) -> str:
    """Of ours that it is nearest to: the method's, with its sampler where that is drawn."""
    of_method = [point.maker for point in points if point.method == row.method]
    sampler = str(row.knobs.get("sampler", ""))
    alike = [maker for maker in of_method if f", {sampler}" in maker]
    return colours[(alike or of_method)[0]] if of_method else GREY


def _different(points: Sequence[Point], key: Callable[[Point], str]) -> list[Point]:
    return list({key(point): point for point in reversed(points)}.values())


def _one(points: Sequence[Point]) -> str:
    """Who measured, where that is one."""
    who = {point.by for point in points}
    return f" ({Path(who.pop()).name})" if len(who) == 1 else ""


def _warnings(points: Sequence[Point], what: str) -> list[str]:
    """What may not be set beside what."""
    who = sorted({point.by for point in points})
    apart = f"{what} differ ({', '.join(who)}): points of one are not to be compared with another's"
    return [apart] * (len(who) > 1) + list(dict.fromkeys(point.label for point in points if point.label))
