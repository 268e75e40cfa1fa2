"""The curves of a run as PNG and SVG, from its metrics.jsonl. Knows nothing of how they came about."""

import importlib.util
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.training.logbook import read_metrics


def plot(run: Path) -> list[Path]:
    """RUN/curves.png and RUN/curves.svg: the bound in training and on held-out rows, and how the run went."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl, so it is no run of `adlm train`")
    lines = read_metrics(path)
    if not lines:
        raise UserError(f"{path} holds no line yet; wait for the first step that is logged")
    figure = _drawn(lines, run.name)
    places = [run / "curves.png", run / "curves.svg"]
    for place in places:
        partial = place.with_name(f".{place.name}")
        try:
            figure.savefig(partial, format=place.suffix[1:], dpi=120)
            partial.replace(place)
        except OSError as error:
            raise UserError(f"{place} cannot be written: {error.strerror}") from None
    return places


def _drawn(lines: list[dict[str, Any]], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (bound, anchor), (norm, speed) = figure.subplots(2, 2)
    _line(bound, lines, "nats", "training")
    measured = [line for line in lines if line.get("valid_nats") is not None]
    if measured:
        bound.errorbar(
            [line["step"] for line in measured],
            [line["valid_nats"] for line in measured],
            [line["valid_stderr"] or 0.0 for line in measured],
            label="held out, with its standard error",
            capsize=2,
        )
    bound.set_ylabel("bound, nats a token (without the anchor term)")
    bound.legend()
    if any("anchor" in line for line in lines):
        _line(anchor, lines, "anchor", "anchor cross-entropy")
        anchor.set_ylabel("anchor term before gamma, nats a token")
    else:
        _line(anchor, lines, "perplexity", "perplexity")
        anchor.set_ylabel("perplexity in training")
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
    for axes in (bound, anchor, norm, speed):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return figure


def _line(axes: Any, lines: list[dict[str, Any]], name: str, label: str, color: str = "tab:blue") -> None:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    axes.plot([step for step, _ in points], [value for _, value in points], label=label, color=color, linewidth=1.2)
