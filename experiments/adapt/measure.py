"""Bits per byte of models on texts, with errors: the causal model as it is or fine-tuned, and block-causal ones.

    python experiments/adapt/measure.py runs/blocks4 --texts enwiki=valid.txt books=other.txt --out results.jsonl

A text is a file whose documents are apart at blank lines. Every model reads the same rows: documents one after the
other, each ended by eos, cut to rows of --length tokens.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import adlm
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import summarize
from adlm.likelihood.text_sets import rows_of_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", default="", help="how to name it in the results")
    parser.add_argument("--texts", nargs="+", required=True, help="NAME=FILE")
    parser.add_argument("--estimators", nargs="+", help="by default all that the model has")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, help="tokens of a row; by default those of the model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = adlm.load(options.model, device)
    bound = "nelbo" if lm.config.time.steps else "any-order"
    own = [bound, "left-to-right", "causal", *(["chained"] if lm.config.model.chain else [])]
    estimators = ["exact"] if lm.method.exact else options.estimators or own
    for text in options.texts:
        name, _, path = text.partition("=")
        content = Path(path).read_text(encoding="utf-8")
        documents = [part for part in content.split("\n\n") if part.strip()]
        rows = rows_of_texts(documents, lm.require_tokenizer(), options.length or lm.config.length)
        num_bytes = sum(len(document.encode()) for document in documents)
        for estimator in estimators:
            is_random = estimator in ("any-order", "nelbo")
            settings = PerplexitySettings(
                "auto" if estimator == "exact" else estimator, options.samples * is_random or 1
            )
            began = time.monotonic()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                estimate = summarize(measure_nats(lm.method, lm.network, rows, settings))
            scale = estimate.tokens / num_bytes / math.log(2)
            result = {
                "model": options.name or options.model,
                "text": name,
                "estimator": estimator,
                "bits_per_byte": round(estimate.nats * scale, 5),
                "monte_carlo": estimate.monte_carlo and round(estimate.monte_carlo * scale, 5),
                "over_documents": estimate.over_documents and round(estimate.over_documents * scale, 5),
                "nats_per_token": round(estimate.nats, 5),
                "tokens": estimate.tokens,
                "bytes": num_bytes,
                "seconds": round(time.monotonic() - began, 1),
            }
            print(json.dumps(result), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
