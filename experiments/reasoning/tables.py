"""The results of the reasoning sweep as Markdown tables and as a figure. Trains nothing."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sweep import Results, sweep_of

from adlm.apps.paper.results import TABLES

Result = Mapping[str, Any]
METHODS = ("no-cot", "pause", "cot", "icot", "coconut", "coconut-pause", "acot")
FIRST = ("first", "first-again")
"""First stages, by the name of their rows; `first-again` was trained later, for rows that were still missing."""
TITLES = {name: group.question for name, group in sweep_of("reasoning").groups.items()} | {
    "scratch-first": "ProsQA, random weights, 24,000 problems",  # trained before the sweep was written
}


def published(data: str) -> dict[str, float]:
    """The paper's accuracies by method, of GPT-2."""
    return {row.name: row.figures[data] for row in TABLES["reasoning"].rows}


def groups_of(results: Results) -> dict[str, dict[str, Result]]:
    """The results of each group, by row without the group's name, and seed: acot-0."""
    groups: dict[str, dict[str, Result]] = {}
    for result in results.of("trial").values():
        group = result["group"]
        groups.setdefault(group, {})[f"{result['row'].removeprefix(f'{group}-')}-{result['seed']}"] = result
    return groups


def seeds_of(rows: Mapping[str, Result], method: str) -> list[Result]:
    return [row for name, row in sorted(rows.items()) if name.rpartition("-")[0] == method]


def tables(results: Results) -> Iterator[str]:
    """One Markdown table per group: accuracy with its interval for each seed, tokens, and the paper's figure."""
    for group, rows in groups_of(results).items():
        paper = published(next(iter(rows.values()))["data"])
        yield f"\n{group}\n"
        yield "| method | accuracy, one value per seed | tokens written | paper, GPT-2 |\n|---|---|---|---|"
        for method in (*FIRST, *METHODS):
            found = seeds_of(rows, method)
            if not found:
                continue
            cells = []
            for row in found:
                low, high = row["interval"]
                cells.append(f"{row['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f})")
            tokens = sum(row["tokens"] for row in found) / len(found)
            yield f"| `{method}` | {', '.join(cells)} | {tokens:.1f} | {paper.get(method, '')} |"
        yield ""
        for ours, theirs in ((f"acot-{seed}", f"{other}-{seed}") for seed in (0, 1) for other in ("cot", "coconut")):
            if "solved" in rows.get(ours, {}) and "solved" in rows.get(theirs, {}):
                yield paired(ours, rows[ours]["solved"], theirs, rows[theirs]["solved"])


def paired(ours: str, our_solved: str, theirs: str, their_solved: str) -> str:
    """The problems that one of two models solves and the other does not, with the exact two-sided sign test."""
    pairs = list(zip(our_solved, their_solved, strict=True))
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    num, fewer = gained + lost, min(gained, lost)
    chance = min(1.0, 2 * sum(math.comb(num, count) for count in range(fewer + 1)) / 2**num)
    return f"{gained} problems are solved by {ours} only, {lost} by {theirs} only (sign test: p = {chance:.2g})"


def figures(results: Results, out: Path) -> list[Path]:
    """Accuracies with their intervals, three groups a line; the paper's figures are open circles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    groups = groups_of(results)
    columns = min(3, len(groups))
    lines = math.ceil(len(groups) / columns)
    size = (4.5 * columns, 3.4 * lines + 0.2)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, (group, rows) in zip(axes.flat, groups.items(), strict=False):
        paper = published(next(iter(rows.values()))["data"])
        for place, method in enumerate(reversed(METHODS)):
            found = seeds_of(rows, method)
            for number, row in enumerate(found):
                low, high = row["interval"]
                height = place + 0.18 * (number - (len(found) - 1) / 2)
                axis.plot([100 * low, 100 * high], [height, height], color="tab:blue", linewidth=2)
                axis.plot(100 * row["accuracy"], height, "o", color="tab:blue", markersize=5)
            if method in paper:
                axis.plot(paper[method], place, "o", markerfacecolor="none", color="tab:orange", markersize=8)
        if group.startswith(("scratch", "muon")):
            axis.axvline(50, color="tab:gray", linestyle="--", linewidth=1)
        axis.set_title(TITLES[group], fontsize=11)
        axis.set_xlabel("% of the test problems solved")
        axis.set_yticks(range(len(METHODS)), list(reversed(METHODS)))
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        "Ours, one dot a seed, with 95% intervals; open circles: the paper's GPT-2; dashed: chance", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(out / "reasoning.png", dpi=130)
    return [out / "reasoning.png"]
