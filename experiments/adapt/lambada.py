"""LAMBADA by lm-eval's protocol: how often the last word of a passage is what greedy decoding writes, and its nats.

    python experiments/adapt/lambada.py smollm2 --passages lambada_test.jsonl --scores causal left-to-right bound

The passages are JSON lines with a "text" each. The words before the last are the context.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import adlm
from adlm.likelihood.conditional import ConditionalRow, ConditionalSettings, conditional_nats
from adlm.methods.inputs import vocabulary_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", default="", help="how to name it in the results")
    parser.add_argument("--passages", type=Path, required=True)
    parser.add_argument("--num", type=int, help="only the first so many")
    parser.add_argument("--scores", nargs="+", default=["causal"], choices=["causal", "left-to-right", "bound"])
    parser.add_argument("--samples", type=int, default=64, help="of the bound, for each passage")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lm = adlm.load(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, before = lm.require_tokenizer(), vocabulary_of(lm.config).row_boundaries[0]
    rows = []
    for line in options.passages.read_text(encoding="utf-8").splitlines()[: options.num]:
        text = json.loads(line)["text"]
        context = tokenizer.encode(text.rpartition(" ")[0])
        rows.append(ConditionalRow((*before, *context), tuple(tokenizer.encode(text)[len(context) :])))
    for score in ["causal"] if lm.method.exact else options.scores:
        began = time.monotonic()
        settings = ConditionalSettings(score=score, samples=options.samples)
        results = conditional_nats(lm.method, lm.network, rows, settings)
        accuracy, nats = (
            sum(values) / len(rows) for values in ([r.greedy for r in results], [r.nats for r in results])
        )
        result = {
            "model": options.name or options.model,
            "score": score,
            "passages": len(rows),
            "accuracy": round(accuracy, 4),
            "stderr": round(math.sqrt(accuracy * (1 - accuracy) / (len(rows) - 1)), 4),
            "perplexity": round(math.exp(nats), 3),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(result), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
