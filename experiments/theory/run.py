"""The theory, run: proposition 4.4 by fitting tables, EM's monotonicity, the toy of appendix A.3.4.

python experiments/theory/run.py        (about two minutes; writes docs/figures/theory.png and result.json here)
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from em import em
from tables import errors, num_entries, predicted, random_language

from adlm.diffusion.masking import posterior

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
FIGURE = HERE.parents[1] / "docs" / "figures" / "theory.png"
COLOURS = {"AR": "#4878a8", "DLM": "#b8574a", "anchored": "#3f8f5b"}
ORDERS = {"AR": "$K^L$", "DLM": "$L\\,(K{+}1)^L$", "anchored": "$L\\,K^{d+1}$"}
WORDS, PARENTS, LANGUAGES, TARGET = 2, 1, 8, 0.05


def curves(length: int, sizes: list[int], draws: np.random.Generator) -> dict[str, np.ndarray]:
    """Errors (languages, sizes) of each model."""
    languages = [random_language(WORDS, length, PARENTS, draws) for _ in range(LANGUAGES)]
    runs = [[errors(language, size, draws) for size in sizes] for language in languages]
    return {name: np.array([[run[name] for run in row] for row in runs]) for name in COLOURS}


def needed(length: int, draws: np.random.Generator) -> dict[str, float]:
    """Texts until the mean error is TARGET nats, by interpolation on a grid of sizes."""
    sizes = [int(10**power) for power in np.arange(0.5, 6.3, 0.25)]
    found = {}
    for name, table in curves(length, sizes, draws).items():
        mean = np.maximum.accumulate(table.mean(axis=0)[::-1])[::-1]
        found[name] = float(np.exp(np.interp(-np.log(TARGET), -np.log(mean), np.log(sizes))))
        if mean[-1] > TARGET:
            found[name] = float("nan")
    return found


def toy() -> dict[str, float]:
    """(1,0,0) with .9, (0,1,1) with .1: P((m,0,m)) one step from all masks, by MDLM's beliefs or the known anchor."""
    mask, z = 2, torch.full((1, 3), 2)
    mdlm = torch.tensor([[[0.1, 0.9, 0], [0.9, 0.1, 0], [0.9, 0.1, 0]]], dtype=torch.float64)
    known = mdlm.clone()
    known[0, 1] = torch.tensor([1.0, 0, 0])
    alpha_s, alpha_t = (torch.tensor(a, dtype=torch.float64) for a in (2 / 3, 1 / 3))
    chances = {}
    for name, beliefs in (("mdlm", mdlm), ("anchor known", known)):
        step = posterior(z, beliefs, alpha_s, alpha_t, mask)[0]
        chances[name] = float(step[0, mask] * step[1, 0] * step[2, mask])
    return chances


def main() -> None:
    draws = np.random.default_rng(0)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    length, sizes = 6, [int(10**power) for power in np.arange(1, 6.1, 0.5)]
    example = random_language(WORDS, length, PARENTS, draws)
    lines = predicted(example)
    for name, table in curves(length, sizes, draws).items():
        mean, spread = table.mean(axis=0), table.std(axis=0) / np.sqrt(LANGUAGES)
        left.errorbar(
            sizes, mean, spread, color=COLOURS[name], marker="o", ms=4, lw=1.6, label=f"{name}, {ORDERS[name]}"
        )
        left.plot(sizes, lines[name] / np.array(sizes), color=COLOURS[name], ls="--", lw=1)
    left.set(xscale="log", yscale="log", ylim=(1e-6, 5), xlabel="texts seen, n", ylabel="nats a text above the entropy")
    left.set_title(
        f"held-out error, L = {length}, K = {WORDS}, d = {PARENTS}\n(dashed: predicted for large n)", fontsize=11
    )
    left.legend(frameon=False)
    lengths = list(range(2, 9))
    counts = {n: needed(n, draws) for n in lengths}
    orders = {n: predicted(random_language(WORDS, n, PARENTS, draws)) for n in lengths}
    for name, colour in COLOURS.items():
        middle.plot(lengths, [counts[n][name] for n in lengths], color=colour, marker="o", ms=4, lw=1.6, label=name)
        middle.plot(lengths, [orders[n][name] / TARGET for n in lengths], color=colour, ls="--", lw=1)
    middle.set(yscale="log", xlabel="length L", ylabel="texts needed")
    middle.set_title(f"texts until the error is {TARGET} nats\n(dashed: predicted order)", fontsize=11)
    rounds = [list(em(random_language(2, 4, 2, draws), 4, 60, draws)) for _ in range(8)]
    steps = []
    for run in rounds:
        likelihood = np.array([each.log_likelihood for each in run])
        steps.append(np.diff(likelihood).min())
        right.plot(likelihood, color=COLOURS["anchored"], lw=1.2, alpha=0.8)
    right.set(xlabel="round of EM", ylabel="log p(x | z), mean over texts and states")
    right.set_title("the anchor as a latent variable: the\nlikelihood never falls (8 languages, 8 starts)", fontsize=11)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    result = {
        "texts needed": {str(n): counts[n] for n in lengths},
        "predicted": {str(n): {name: value / TARGET for name, value in orders[n].items()} for n in lengths},
        "table entries, L = 6": num_entries(example),
        "smallest step of EM": float(min(steps)),
        "toy of A.3.4": toy(),
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
