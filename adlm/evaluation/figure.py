"""Cards as a picture: perplexity against entropy, MAUVE against steps. Knows nothing of how the figures came about."""

import importlib.util
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.evaluation.card import Card, labels

FORMS = (".png", ".svg", ".pdf")
MARKERS = "osD^vPX"
PLAIN = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}  # what samples are made with unless a label says otherwise


def plot(cards: Sequence[Card], path: Path) -> None:
    """Cards of one model and sampler are joined in the order of their steps; error bars are standard errors, and for
    MAUVE the spread over k-means seeds. Judges and featurisers are named, and where they differ that is written above.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    if path.suffix not in FORMS:
        raise UserError(f"--out {path} is no picture; one ends in {', '.join(FORMS)}")
    if not any("mauve" in card or _has_point(card) for card in cards):
        raise UserError("none of the cards has perplexity and entropy, or MAUVE: there is nothing to draw")
    figure = _drawn(cards)
    partial = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial, format=path.suffix[1:], dpi=130)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _drawn(cards: Sequence[Card]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    judged = [card for card in cards if _has_point(card)]
    compared = [card for card in cards if "mauve" in card]
    _panel(left, judged, _judge, lambda axes, series, style: _errors(axes, series, _perplexity_point, style))
    _reference(left, judged)
    left.set_xlabel("unigram entropy of a sample, nats (more varied to the right)")
    left.set_ylabel(f"generative perplexity, pooled{_one(judged, _judge)}")
    _steps(left, judged)
    _panel(right, compared, _featuriser, lambda axes, series, style: _errors(axes, series, _mauve_point, style))
    right.set_xlabel("steps")
    right.set_ylabel(f"MAUVE{_one(compared, _featuriser)}")
    _step_ticks(right, sorted({_num_steps(card) for card in compared}))
    for axes, shown in ((left, judged), (right, compared)):
        if shown:
            axes.legend(fontsize=8)
    figure.supxlabel("bars: standard errors over samples; of MAUVE, the spread over k-means seeds", fontsize=8)
    figure.suptitle("\n".join(_warnings(judged, compared)), fontsize=8, color="tab:red")
    return figure


def _panel(
    axes: Any,
    cards: Sequence[Card],
    by: Callable[[Card], str],
    draw: Callable[[Any, list[Card], dict[str, Any]], None],
) -> None:
    """One colour a model and sampler; one marker a judge or featuriser, named in the legend where there are several."""
    if not cards:
        axes.text(0.5, 0.5, "no card has it", ha="center", va="center", transform=axes.transAxes, color="grey")
    makers, who = list(dict.fromkeys(_maker(card) for card in cards)), list(dict.fromkeys(by(card) for card in cards))
    markers = dict(zip(who, cycle(MARKERS), strict=False))
    for number, maker in enumerate(makers):
        for judge in who:
            series = sorted((card for card in cards if (_maker(card), by(card)) == (maker, judge)), key=_num_steps)
            if series:
                name = maker if len(who) == 1 else f"{maker} [{judge}]"
                draw(axes, series, {"color": f"C{number % 10}", "marker": markers[judge], "label": name})
    axes.grid(alpha=0.3)


def _errors(axes: Any, series: list[Card], point: Callable[[Card], tuple[float, ...]], style: dict[str, Any]) -> None:
    x, y, x_error, y_error = zip(*(point(card) for card in series), strict=True)
    axes.errorbar(x, y, yerr=y_error, xerr=x_error, capsize=3, linewidth=1, **style)


def _perplexity_point(card: Card) -> tuple[float, ...]:
    pooled, entropy = card["perplexity"]["pooled"], card["entropy"]
    return entropy["value"], pooled["value"], entropy["stderr"] or 0.0, pooled["stderr"] or 0.0


def _mauve_point(card: Card) -> tuple[float, ...]:
    return _num_steps(card), card["mauve"]["value"], 0.0, card["mauve"]["spread"] or 0.0


def _steps(axes: Any, cards: Sequence[Card]) -> None:
    """T beside every point."""
    for card in cards:
        x, y, _, _ = _perplexity_point(card)
        axes.annotate(f"T={_num_steps(card)}", (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)


def _step_ticks(axes: Any, steps: list[int]) -> None:
    if len(steps) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(steps, map(str, steps))
    axes.minorticks_off()


def _reference(axes: Any, cards: Sequence[Card]) -> None:
    """The reference itself, a star for each judge that read it."""
    several, seen = len({_judge(card) for card in cards}) > 1, set[str]()
    for card in cards:
        if not _has_point(card.get("reference_judged", {})):
            continue
        name = f"reference [{_judge(card)}]" if several else "reference"
        label = None if name in seen else name
        seen.add(name)
        x, y, x_error, y_error = _perplexity_point(card["reference_judged"])
        axes.errorbar(x, y, yerr=y_error, xerr=x_error, capsize=3, color="black", marker="*", linestyle="", label=label)


def _has_point(figures: Card) -> bool:
    if not {"perplexity", "entropy"} <= figures.keys():
        return False
    return figures["perplexity"]["pooled"]["value"] is not None and figures["entropy"]["value"] is not None


def _num_steps(card: Card) -> int:
    return int(card["samples"]["made_by"]["sampling"]["steps"])


def _maker(card: Card) -> str:
    made_by, sampling = card["samples"]["made_by"], card["samples"]["made_by"]["sampling"]
    knobs = [f"{knob} {sampling[knob]:g}" for knob, plain in PLAIN.items() if sampling[knob] != plain]
    return ", ".join([f"{Path(made_by['model']).name} ({made_by['method']})", sampling["sampler"], *knobs])


def _judge(card: Card) -> str:
    return str(card["perplexity"]["judge"]["name"])


def _featuriser(card: Card) -> str:
    return str(card["mauve"]["featuriser"]["name"])


def _one(cards: Sequence[Card], by: Callable[[Card], str]) -> str:
    """Who measured, where that is one."""
    who = {by(card) for card in cards}
    return f" ({Path(who.pop()).name})" if len(who) == 1 else ""


def _warnings(judged: Sequence[Card], compared: Sequence[Card]) -> list[str]:
    """What may not be set beside what."""
    found = []
    for what, who in (
        ("judges", {_judge(card) for card in judged}),
        ("featurisers", {_featuriser(card) for card in compared}),
    ):
        if len(who) > 1:
            found.append(
                f"{what} differ ({', '.join(sorted(who))}): points of one are not to be compared with another's"
            )
    return found + list(dict.fromkeys(label for card in (*judged, *compared) for label in labels(card)))
