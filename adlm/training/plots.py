"""Training curves as PNG and SVG, from metrics.jsonl. Independent of training itself."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.files import PLOT_METADATA, replacing, scan_metrics

Lines = list[dict[str, Any]]


def plot_runs(runs: Sequence[Path], report: Callable[[str], None] = lambda message: None) -> list[Path]:
    """Write curves.png and .svg into a run's folder; for several runs, comparison.png and .svg into the first's."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    curves = {str(run): _read_lines(run, report) for run in runs}
    if len(curves) > 1:
        name, figure = "comparison", _plot_comparison(curves)
    else:
        name, figure = "curves", _plot_run(curves[str(runs[0])], runs[0].name)
    paths = [runs[0] / f"{name}.png", runs[0] / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path)
    return paths


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure atomically, in the format of the suffix."""
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=120, metadata=PLOT_METADATA[path.suffix])


def _read_lines(run: Path, report: Callable[[str], None]) -> Lines:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl, so it is not a run of `adlm train`")
    lines, num_damaged = scan_metrics(path)
    if num_damaged:
        report(f"{path} has {num_damaged} damaged line(s), which are left out")
    if not lines:
        raise UserError(f"{path} is empty; wait for the first logged step")
    return lines


def _plot_comparison(curves: Mapping[str, Lines]) -> Any:
    """Nats of all runs in one plot, one color each: validation as points, training as a faint line."""
    figure = new_figure((9, 5.5))
    axes = figure.subplots()
    for number, (name, lines) in enumerate(curves.items()):
        color = f"C{number % 10}"
        _plot_metric(axes, lines, "nats", f"{name}, in training", color, 0.35)
        if any(line.get("valid_nats") is not None for line in lines):
            _plot_validation(axes, lines, f"{name}, held out", color)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token, without the anchor term")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def new_figure(size: tuple[float, float]) -> Any:
    """A matplotlib figure of this size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plot_validation(axes: Any, lines: Lines, label: str, color: str) -> None:
    validated = [line for line in lines if line.get("valid_nats") is not None]
    axes.errorbar(
        [line["step"] for line in validated],
        [line["valid_nats"] for line in validated],
        [line.get("valid_stderr") or 0.0 for line in validated],
        label=label,
        color=color,
        marker="o",
        markersize=3,
        capsize=2,
    )


def _plot_run(lines: Lines, title: str) -> Any:
    figure = new_figure((11, 7))
    figure.suptitle(title)
    (nats, anchor), (norm, speed) = figure.subplots(2, 2)
    _plot_metric(nats, lines, "nats", "in training")
    if any(line.get("valid_nats") is not None for line in lines):
        _plot_validation(nats, lines, "held out, with its standard error", "tab:orange")
    nats.set_ylabel("nats per token, without the anchor term")
    nats.legend()
    if any("anchor" in line for line in lines):
        _plot_metric(anchor, lines, "anchor", "anchor cross-entropy")
        anchor.set_ylabel("anchor term before gamma, nats per token")
    else:
        _plot_metric(anchor, lines, "valid_perplexity", "perplexity")
        anchor.set_ylabel("perplexity of held-out text")
        anchor.set_yscale("log")
    _plot_metric(norm, lines, "gradient_norm", "gradient norm")
    norm.set_ylabel("gradient norm before clipping")
    norm.set_yscale("log")
    rate = norm.twinx()
    _plot_metric(rate, lines, "learning_rate", "learning rate", color="tab:orange")
    rate.set_ylabel("learning rate")
    _plot_metric(speed, lines, "tokens_per_second", "tokens per second")
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    for axes in (nats, anchor, norm, speed):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return figure


def _plot_metric(axes: Any, lines: Lines, name: str, label: str, color: str = "tab:blue", alpha: float = 1.0) -> None:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, label=label, color=color, alpha=alpha, linewidth=1.2)
