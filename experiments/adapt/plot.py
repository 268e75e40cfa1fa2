"""The training curves of experiments/adapt/curves as one figure.

python experiments/adapt/plot.py docs/figures/adapt.svg
"""

import json
import sys
from pathlib import Path

from adlm.apps.plots import COLOURS, new_figure, save_figure

CURVES = Path(__file__).parent / "curves"
NAMES = {"causal-fine-tuned": "causal, fine-tuned", "full4": "blocks of 4", "lora4": "blocks of 4, LoRA"}


def main() -> None:
    figure = new_figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    for (run, name), colour in zip(NAMES.items(), COLOURS, strict=False):
        lines = [json.loads(line) for line in (CURVES / f"{run}.jsonl").read_text().splitlines()]
        tokens = [line["tokens"] / 1e6 for line in lines]
        left.plot(tokens, [line.get("causal", line["nats"]) for line in lines], color=colour, label=name)
        if "causal" in lines[0]:
            right.plot(tokens, [line["nats"] for line in lines], color=colour, label=name)
    left.set_title("next token, of the clean copy", fontsize=10)
    right.set_title("masked tokens, t from 0.45 to 0.95", fontsize=10)
    for axes in (left, right):
        axes.set(xlabel="million tokens", ylabel="training nats per token")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    save_figure(figure, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
