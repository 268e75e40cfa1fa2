"""The results of the arena as figures. Trains nothing."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from arena.tables import (
    ARENA,
    Floats,
    Result,
    Timings,
    Trials,
    paired,
    released_bound,
    stderr_of,
    trials_with_results,
    with_seconds,
)
from matplotlib.figure import Figure
from sweep import key_of

BOUND = "nats per token, held-out rows"
matplotlib.rcParams["svg.hashsalt"] = "arena"  # with no date, the same results give the same file


def plot_groups(results: Trials, timings: Timings, out: Path) -> list[Path]:
    """One SVG per group: differences during training, bounds against seconds if timed, differences at the end.

    The differences are from the same seed of the first row that the group is compared with. During training they are
    of validation bounds, where these were logged, from a fifth of the steps on: before, they are far larger.
    """
    files = []
    for name, group in ARENA.groups.items():
        trials = list(trials_with_results(group, results))
        if not any(row in group.rows for row, _, _ in trials):
            continue
        titles = {row.name: row.title for row, _, _ in trials}
        names = list(titles)
        colors = dict(zip(names, matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(names))), strict=True))
        has_curves = any(len(result["curve"]) > 1 for _, _, result in trials)  # not with train.valid_every=0
        timed, notes = with_seconds(trials, timings) if has_curves else ([], "")
        num_panels = 1 + has_curves + bool(timed)
        height = max(0.2 * len(names) + (3.5 if has_curves else 1.5), 5 * has_curves)
        figure = Figure(figsize=(3.5 + 4.5 * num_panels, height), layout="constrained")
        axes = figure.subplots(1, num_panels, squeeze=False)[0]
        right = axes[-1]
        first = ARENA.rows[group.against[0]]
        right.axvline(0, color=colors.get(first.name, "0.3"), linewidth=1)
        for row, seed, result in trials:
            reference = results.get(key_of(first.name, seed))
            gap = paired(result, reference)
            if row == first or gap is None or reference is None:
                continue
            if has_curves:
                steps, gaps = curve_difference(result, reference)
                tokens = steps * result["tokens"] / result["steps"] / 1e6
                axes[0].plot(tokens, gaps, color=colors[row.name], linewidth=1)
            place, error = len(names) - names.index(row.name), stderr_of(gap)
            right.errorbar(gap.nats, place, xerr=error, fmt="o", color=colors[row.name], markersize=4)
        if has_curves:
            axes[0].axhline(0, color=colors.get(first.name, "0.3"), linewidth=1)
            axes[0].set(xlabel="million tokens", ylabel=f"{BOUND},\nminus: {first.title}")
        if timed:
            for trial in timed:
                _, seconds, bounds = trial.curve
                axes[1].plot(seconds, bounds, color=colors[trial.row.name], linewidth=1)
            axes[1].set(xlabel="seconds", ylabel=BOUND)
            figure.supxlabel(textwrap.fill(notes, 230), fontsize=8)
        right.set_xlabel(f"nats per token at the end, minus: {first.title}")
        right.yaxis.tick_right()
        right.set_yticks(range(len(names), 0, -1), list(titles.values()))
        right.set_ylim(0.5, len(names) + 0.5)
        right.locator_params(axis="x", nbins=6)
        for axis in axes:
            axis.grid(alpha=0.3)
        figure.suptitle(f"{name}: {group.question}")
        files.append(out / f"{name}.svg")
        figure.savefig(files[-1], metadata={"Date": None})
    return files


def curve_difference(ours: Result, theirs: Result) -> tuple[Floats, Floats]:
    """Steps at which both were validated, from a fifth of our steps on, and the differences of the bounds."""
    others = {step: bound for step, _, bound, _ in theirs["curve"]}
    common = [point for point in ours["curve"] if point[0] in others and 5 * point[0] >= ours["steps"]]
    return np.array([point[0] for point in common]), np.array([point[2] - others[point[0]] for point in common])


def plot_released_bound(results: Trials, timings: Timings, out: Path) -> list[Path]:
    """Validation bounds against seconds: the released configuration, the first to reach its bound, and others."""
    found = released_bound(results, timings)
    if found is None:
        return []
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for trial in found.trials:
        axis.plot(*trial.curve[1:], color="0.85", linewidth=0.8)
    for trial, color in ((found.released, "tab:red"), (found.soonest, "tab:blue")):
        seconds, is_limit = trial.seconds_until(found.nats)
        label = f"{trial.row.title}: {'at most ' * is_limit}{seconds:.3g} s"
        axis.plot(*trial.curve[1:], color=color, marker=".", label=label)
        axis.plot(seconds, found.nats, "o", color=color, markersize=9, fillstyle="none")
    axis.axhline(found.nats, color="0.3", linestyle="--", linewidth=1, label=f"bound {found.nats:.3f}")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("seconds of training steps")
    axis.set_ylabel(BOUND)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.suptitle("How soon is the released configuration's bound reached? Grey: all other models")
    figure.savefig(out / "released-bound.svg", metadata={"Date": None})
    return [out / "released-bound.svg"]
