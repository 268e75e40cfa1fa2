"""Texts of speed.py judged by another language model: nats per token and per byte, entropy, repetition.

    python experiments/adapt/judge.py speed.jsonl --judge tinyllama.gguf --out judged.jsonl

Every line with "texts" becomes a line of --out, without the texts and with "judged". Rerun the command to resume: lines
that are done are skipped. Every window of the judge begins with its bos, and every token of a text counts.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.apps.judge.diversity import entropy_of, mean_of, repeated
from adlm.apps.judge.generative_perplexity import (
    Judge,
    generative_perplexity,
    scoring_convention,
    token_nats,
    window_layout,
)
from adlm.apps.judge.judges import judge_of
from adlm.apps.judge.pipeline import json_sha256
from adlm.likelihood.standard_errors import Nats, summarize

BOS = r"^(<\|im_start\|>|<\|endoftext\|>|<s>)"  # of SmolLM2, GPT-2 and Llama, where a text has it written out


def judged(judge: Judge, texts: list[str], batch: int) -> dict[str, object]:
    """The metrics of texts that are not empty, with standard errors over texts."""
    began = time.monotonic()
    start, eos = scoring_convention(judge.about, "bos", "all")
    layout = window_layout(judge.about, start, judge.about.context)
    rows, nats = judge.encode(texts), []
    for first in range(0, len(rows), batch):
        nats += token_nats(judge, rows[first : first + batch], batch, layout)
        print(f"\r{len(nats)} of {len(rows)} texts, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    perplexity = generative_perplexity(rows, nats, judge.about.eos_id, eos, start).pooled
    sums = np.array([row.sum(dtype=np.float64) for row in nats])[:, None]
    by_byte = summarize(Nats(sums, sums, np.array([len(text.encode()) for text in texts]), exact=True))
    entropy, repetition = entropy_of(rows), mean_of(map(repeated, rows))
    return {
        "texts": len(rows),
        "tokens": sum(map(len, rows)),
        "bytes": by_byte.tokens,
        "nats_per_token": _rounded(perplexity.nats, perplexity.nats_stderr),
        "nats_per_byte": _rounded(by_byte.nats, by_byte.over_documents),
        "perplexity": _rounded(perplexity.value, perplexity.stderr),
        "entropy": _rounded(entropy.value, entropy.stderr),
        "repeated": _rounded(repetition.value, repetition.stderr),
        "nats_per_token_by_text": [round(float(row.mean()), 4) for row in nats],
        "repeated_by_text": [None if value is None else round(value, 4) for value in map(repeated, rows)],
        "seconds": round(time.monotonic() - began, 1),
    }


def _rounded(*values: float | None) -> list[float | None]:
    """A value and its standard error."""
    return [None if value is None else round(value, 5) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--judge", required=True, help="what `adlm judge --model` takes, such as a .gguf file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = Path(options.judge).name
    lines = [json.loads(line) for file in options.files for line in file.read_text(encoding="utf-8").splitlines()]
    written = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    done = {(result["judge"], result["line"]) for result in map(json.loads, written)}
    left = [line for line in lines if _texts(line) and (name, json_sha256(line)) not in done]
    print(f"{len(lines)} lines, {len(left)} with texts to judge", file=sys.stderr)
    judge = judge_of(options.judge, torch.device("cuda" if torch.cuda.is_available() else "cpu")) if left else None
    for line in left:
        result = {key: value for key, value in line.items() if key != "texts"}
        result |= {"judge": name, "line": json_sha256(line)}
        result["judged"] = judged(judge, _texts(line), options.batch)
        print(json.dumps({key: value for key, value in result.items() if key != "line"}), flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _texts(line: dict[str, Any]) -> list[str]:
    """The texts of a line that are not empty, without a bos."""
    texts = [re.sub(BOS, "", text) for text in line.get("texts", [])]
    return [text for text in texts if text]


if __name__ == "__main__":
    main()
