"""A picture of each sampler: when each token of a text of the model in the box is revealed, and when it is remasked.

python experiments/sampler_pictures/run.py docs/figures/samplers.png
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

import adlm
from adlm.sampling.frame import Frame

TOKENS, STEPS = 48, 96
SAMPLERS = (
    *("ancestral", "remdm-cap", "remdm-rescale", "remdm-loop", "remdm-conf"),
    *("forward-backward", "dfm", "analytic", "semi-autoregressive", "left-to-right"),
    *("certainty", "margin", "entropy", "anchor-first", "confidence", "threshold"),
)
KEPT, TAKEN_BACK = "#3b6fd4", "#d6498a"


def spans(frames: Iterator[Frame]) -> list[tuple[int, float, float, bool]]:
    """(position, from, to, whether it is kept) of every token, in elapsed time 1 - t."""
    since: dict[int, float] = {}
    found = []
    for frame in frames:
        now = 1 - frame.t[0].item()
        for position in frame.remasked[0].nonzero().flatten().tolist():
            if position in since:
                found.append((position, since.pop(position), now, False))
        for position in frame.revealed[0].nonzero().flatten().tolist():
            since.setdefault(position, now)
    return found + [(position, start, 1.0, True) for position, start in since.items()]


def draw(axis: Axes, name: str, tokens: list[tuple[int, float, float, bool]]) -> None:
    for position, start, end, kept in tokens:
        width = max(end - start, 1 / STEPS)  # of a token that is remasked at once, too
        axis.barh(position, width, left=start, height=0.8, color=KEPT if kept else TAKEN_BACK, linewidth=0)
    axis.set(xlim=(0, 1), ylim=(TOKENS - 0.5, -0.5), xticks=[], yticks=[], title=name)
    axis.set_facecolor("#eceae4")
    axis.spines[:].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    lm = adlm.load()
    figure, axes = pyplot.subplots(4, 4, figsize=(12, 8.4))
    for axis, name in zip(axes.flat, SAMPLERS, strict=True):
        draw(axis, name, spans(lm.watch(f"[MASK*{TOKENS}]", sampler=name, steps=STEPS, seed=0)))
    axes[-1, 0].set(xlabel="time, from t = 1 to 0", ylabel="position")
    colours = {"masked": "#eceae4", "token": KEPT, "token that is remasked later": TAKEN_BACK}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="lower right", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
