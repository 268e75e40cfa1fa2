"""The results of the arena as Markdown tables and figures. Reads result files, trains nothing.

Every bound is measured on the same held-out rows with the same random numbers, so differences are paired: their
standard errors combine the Monte Carlo error with the one over documents, and do not include the training seed. The
spread over seeds is in a table of its own.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arena_rows import GROUPS, Group, Row, key_of, rows_by_name

from adlm.errors import UserError
from adlm.likelihood.estimate import Estimate, Nats, difference

Result = Mapping[str, Any]
Results = Mapping[str, Result]


def read_results(folder: Path) -> dict[str, Result]:
    """The results by key."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))}


def nats_as_json(nats: Nats) -> dict[str, Any]:
    """All that paired differences need, to 0.001 nats per document."""
    return {
        "exact": nats.exact,
        "group_nats": nats.groups.round(3).tolist(),
        "document_nats": nats.documents.round(3).tolist(),
        "document_tokens": nats.tokens.tolist(),
    }


def nats_of(result: Result) -> Nats:
    arrays = (np.array(result[name]) for name in ("group_nats", "document_nats", "document_tokens"))
    return Nats(*arrays, exact=result["exact"])


def stderr_of(estimate: Estimate) -> float:
    """Both standard errors combined; one that is too small to be told from the other counts as 0."""
    return math.hypot(estimate.monte_carlo or 0.0, estimate.over_documents or 0.0)


def markdown(results: Results) -> Iterator[str]:
    """The tables of all groups with results."""
    for name, group in GROUPS.items():
        if any(key_of(row.name, seed) in results for row in group.rows for seed in row.seeds):
            yield f"## {name}: {group.question}\n"
            yield from _at_equal_tokens(group, results)
            yield from _over_seeds(group, results)
            yield from _at_equal_seconds(group, results)


def _rows(group: Group) -> list[Row]:
    """The rows of a group after those they are compared with."""
    named = rows_by_name()
    return list(dict.fromkeys((*(named[name] for name in group.against), *group.rows)))


def _trials(group: Group, results: Results) -> Iterator[tuple[Row, int, Result]]:
    for row in _rows(group):
        for seed in row.seeds:
            if key_of(row.name, seed) in results:
                yield row, seed, results[key_of(row.name, seed)]


def _header(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def _at_equal_tokens(group: Group, results: Results) -> Iterator[str]:
    """At the end of training: every trial, with paired differences from the same seed of the rows in `against`."""
    against = [f"minus {name}" for name in group.against]
    yield _header("model", "seed", "parameters", "tokens", "training, s", "anchors", "nats per token", *against)
    trials = list(_trials(group, results))
    for row, seed, result in trials:
        share = "" if result["anchor_share"] is None else f"{result['anchor_share']:.1%}"
        gaps = [_paired(result, results.get(key_of(name, seed))) if name != row.name else "" for name in group.against]
        cells = (
            *(row.title, str(seed), f"{result['parameters']:,}", f"{result['tokens']:,}"),
            *(f"{result['train_seconds']:.0f}", share, f"{result['nats']:.4f} ± {result['stderr']:.4f}", *gaps),
        )
        yield f"| {' | '.join(cells)} |"
    texts = {result["held_out"]["sha256"]: result for _, _, result in trials}
    for result in texts.values():
        num = len(result["document_tokens"])
        unit = result["held_out"]["unit"]
        yield f"\nMeasured on {sum(result['document_tokens']):,} tokens in {num} {unit}s. ± is one standard error.\n"


def _paired(ours: Result, theirs: Result | None) -> str:
    """The paired difference; empty without the other result."""
    if theirs is None:
        return ""
    if ours["held_out"] != theirs["held_out"]:
        return "other text"
    try:
        gap = difference(nats_of(ours), nats_of(theirs))
    except UserError:  # other --samples, or documents of which a causal model predicts no token
        return "not paired"
    return f"{gap.nats:+.4f} ± {stderr_of(gap):.4f}"


def _over_seeds(group: Group, results: Results) -> Iterator[str]:
    """The rows with two or more seeds: mean, standard deviation, and the mean difference over pairs of seeds."""
    nats = {
        row.name: {seed: results[key]["nats"] for seed in row.seeds if (key := key_of(row.name, seed)) in results}
        for row in _rows(group)
    }
    several = [row for row in _rows(group) if len(nats[row.name]) > 1]
    if not several:
        return
    yield _header("model", "seeds", "mean", "standard deviation", *(f"minus {name}" for name in group.against))
    for row in several:
        values = list(nats[row.name].values())
        gaps = [_mean_gap(nats[row.name], nats[name]) if name != row.name else "" for name in group.against]
        cells = (row.title, str(len(values)), f"{np.mean(values):.4f}", f"{np.std(values, ddof=1):.4f}", *gaps)
        yield f"| {' | '.join(cells)} |"
    yield "\n± is the standard error of the mean over pairs of seeds.\n"


def _mean_gap(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """The mean difference over the seeds that both have, with its standard error if there are several."""
    gaps = np.array([ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()])
    if not len(gaps):
        return ""
    error = f" ± {gaps.std(ddof=1) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
    return f"{gaps.mean():+.4f}{error}"


def _at_equal_seconds(group: Group, results: Results) -> Iterator[str]:
    """The validation bounds when the fastest trial ends, for trials whose learning rate does not decay."""
    trials = [(row, seed, result) for row, seed, result in _trials(group, results) if result["decay"] == "constant"]
    trials = [trial for trial in trials if trial[2]["curve"]]
    if len(trials) < 2:
        return
    seconds = min(result["curve"][-1][1] for _, _, result in trials)
    nats: dict[str, dict[int, float]] = {}
    tokens: dict[str, list[float]] = {}
    for row, seed, result in trials:
        steps, times, bounds = np.array(result["curve"])[:, :3].T
        nats.setdefault(row.name, {})[seed] = float(np.interp(seconds, times, bounds))
        step = float(np.interp(seconds, times, steps))
        tokens.setdefault(row.name, []).append(step * result["tokens"] / result["steps"])
    titles = {row.name: row.title for row, _, _ in trials}
    yield f"After {seconds:.1f} s of training, by linear interpolation of the validation bounds:\n"
    yield _header("model", "seeds", "tokens", "nats per token", *(f"minus {name}" for name in group.against))
    for name, title in titles.items():
        gaps = [_mean_gap(nats[name], nats.get(other, {})) if other != name else "" for other in group.against]
        mean = f"{np.mean(list(nats[name].values())):.4f}"
        yield f"| {title} | {len(nats[name])} | {np.mean(tokens[name]):,.0f} | {mean} | {' | '.join(gaps)} |"
    jobs = {result["jobs"] for _, _, result in trials}
    beside = "" if jobs == {1} else f" Up to {max(jobs)} trials shared the device, which makes seconds incomparable."
    yield f"\nSeconds of training steps alone, without compilation and validation.{beside}\n"


def plot_groups(results: Results, out: Path) -> list[Path]:
    """One SVG per group: validation bounds against tokens and seconds, where they were logged, and those at the end."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    files = []
    for name, group in GROUPS.items():
        trials = list(_trials(group, results))
        if not any(row in group.rows for row, _, _ in trials):
            continue
        names = list(dict.fromkeys(row.name for row, _, _ in trials))
        colors = dict(zip(names, pyplot.get_cmap("turbo")(np.linspace(0.05, 0.95, len(names))), strict=True))
        has_curves = any(len(result["curve"]) > 1 for _, _, result in trials)  # not with train.valid_every=0
        size = (17 if has_curves else 8, 0.2 * len(names) + (3.5 if has_curves else 1.5))
        figure, axes = pyplot.subplots(1, 3 if has_curves else 1, figsize=size, squeeze=False, layout="constrained")
        *curve_axes, right = axes[0]
        for row, _, result in trials:
            if curve_axes and (curve := result["curve"]):
                left, middle = curve_axes
                steps, seconds, bounds = np.array(curve)[:, :3].T
                tokens = steps * result["tokens"] / result["steps"] / 1e6
                left.plot(tokens, bounds, color=colors[row.name], linewidth=1)
                middle.plot(seconds, bounds, color=colors[row.name], linewidth=1)
            height = len(names) - names.index(row.name)
            right.errorbar(result["nats"], height, xerr=result["stderr"], fmt="o", color=colors[row.name], markersize=4)
        for axis, label in zip(curve_axes, ("million tokens", "seconds of training steps"), strict=False):
            axis.set_xlabel(label)
            axis.set_ylabel("nats per token, held-out rows")
        right.set_xlabel("nats per token at the end, ± one standard error")
        right.yaxis.tick_right()
        right.set_yticks(range(len(names), 0, -1), _titles(names))
        for axis in axes[0]:
            axis.grid(alpha=0.3)
        figure.suptitle(f"{name}: {group.question}")
        files.append(out / f"{name}.svg")
        figure.savefig(files[-1])
        pyplot.close(figure)
    return files


def _titles(names: Sequence[str]) -> list[str]:
    named = rows_by_name()
    return [named[name].title for name in names]
