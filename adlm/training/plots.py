"""The curves of runs as PNG and SVG, from their metrics.jsonl. Knows nothing of how they came about."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.files import PLOT_METADATA, replacing
from adlm.training.metrics import scan_metrics

Lines = list[dict[str, Any]]


def plot_runs(runs: Sequence[Path], say: Callable[[str], None] = lambda sentence: None) -> list[Path]:
    """curves.png and .svg in the folder of a run; of several, overlaid, comparison.png and .svg in the first one's."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    curves = {str(run): _lines(run, say) for run in runs}
    if len(curves) > 1:
        name, figure = "comparison", _overlaid(curves)
    else:
        name, figure = "curves", _drawn(curves[str(runs[0])], runs[0].name)
    places = [runs[0] / f"{name}.png", runs[0] / f"{name}.svg"]
    for place in places:
        with replacing(place) as part:
            figure.savefig(part, format=place.suffix[1:], dpi=120, metadata=PLOT_METADATA[place.suffix])
    return places


def _lines(run: Path, say: Callable[[str], None]) -> Lines:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl, so it is no run of `adlm train`")
    lines, num_damaged = scan_metrics(path)
    if num_damaged:
        say(f"{path} has {num_damaged} damaged line(s), which are left out")
    if not lines:
        raise UserError(f"{path} holds no line yet; wait for the first step that is logged")
    return lines


def _overlaid(curves: Mapping[str, Lines]) -> Any:
    """The nats of all runs on one pair of axes, a colour for each: held out as points, in training as a faint line."""
    figure = _figure((9, 5.5))
    axes = figure.subplots()
    for number, (name, lines) in enumerate(curves.items()):
        color = f"C{number % 10}"
        _line(axes, lines, "nats", f"{name}, in training", color, 0.35)
        if any(line.get("valid_nats") is not None for line in lines):
            _held_out(axes, lines, f"{name}, held out", color)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token, without the anchor term")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _held_out(axes: Any, lines: Lines, label: str, color: str) -> None:
    measured = [line for line in lines if line.get("valid_nats") is not None]
    axes.errorbar(
        [line["step"] for line in measured],
        [line["valid_nats"] for line in measured],
        [line.get("valid_stderr") or 0.0 for line in measured],
        label=label,
        color=color,
        marker="o",
        markersize=3,
        capsize=2,
    )


def _drawn(lines: Lines, title: str) -> Any:
    figure = _figure((11, 7))
    figure.suptitle(title)
    (nats, anchor), (norm, speed) = figure.subplots(2, 2)
    _line(nats, lines, "nats", "in training")
    if any(line.get("valid_nats") is not None for line in lines):
        _held_out(nats, lines, "held out, with its standard error", "tab:orange")
    nats.set_ylabel("nats a token, without the anchor term")
    nats.legend()
    if any("anchor" in line for line in lines):
        _line(anchor, lines, "anchor", "anchor cross-entropy")
        anchor.set_ylabel("anchor term before gamma, nats a token")
    else:
        _line(anchor, lines, "valid_perplexity", "perplexity")
        anchor.set_ylabel("perplexity of held-out text")
        anchor.set_yscale("log")
    _line(norm, lines, "gradient_norm", "gradient norm")
    norm.set_ylabel("gradient norm before clipping")
    norm.set_yscale("log")
    rate = norm.twinx()
    _line(rate, lines, "learning_rate", "learning rate", color="tab:orange")
    rate.set_ylabel("learning rate")
    _line(speed, lines, "tokens_per_second", "tokens a second")
    speed.set_ylabel("tokens a second")
    speed.set_ylim(bottom=0)
    for axes in (nats, anchor, norm, speed):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return figure


def _line(axes: Any, lines: Lines, name: str, label: str, color: str = "tab:blue", alpha: float = 1.0) -> None:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, label=label, color=color, alpha=alpha, linewidth=1.2)
