"""Seconds for 256 tokens and tokens per network call: the causal model, draft and verify, and block sampling.

    python experiments/adapt/speed.py --causal runs/causal --blocks runs/blocks4 runs/blocks16 --out speed.jsonl

Every run is timed after one of the same shape that warms it up. The prompt is bos alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import adlm
from adlm.canvas import Canvas
from adlm.language_model import LanguageModel
from adlm.sampling.settings import SampleSettings, sampling_with

ROWS = (1, 8, 64)
LENGTH = 257
SHAPINGS: tuple[dict[str, object], ...] = ({"top_p": 1.0}, {"top_p": 0.9}, {"temperature": 0.0, "top_p": 1.0})


def timed(lm: LanguageModel, num_rows: int, options: dict[str, object], texts: int = 0) -> dict[str, object]:
    """One run: seconds, tokens, calls; and the first of its texts."""
    canvas = Canvas(torch.full((num_rows, LENGTH), lm.mask_id))
    sampling = sampling_with(lm.config.sampling, options | {"stop_at_eos": False})
    for seed in (1, 0):
        run = lm.plan(SampleSettings(sampling, canvas=canvas, seed=seed))
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        began, calls = time.monotonic(), -1
        revealed = active = torch.zeros(num_rows, dtype=torch.int64, device=lm.device)
        for frame in run.frames():
            calls += 1
            new = frame.revealed.sum(dim=1)
            revealed, active = revealed + new, active + (new > 0)  # on the device: a copy would wait for it
        ids = frame.ids.cpu()
        seconds = time.monotonic() - began
    result: dict[str, object] = {
        "rows": num_rows,
        "options": options,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(float(revealed.sum()) / seconds, 1),
        "calls": calls,
        "tokens_per_call_of_a_row": round(float(revealed.sum() / active.sum()), 3),
    }
    if texts:
        result["texts"] = [lm.require_tokenizer().decode(row, special_tokens=False) for row in ids[:texts].tolist()]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--causal")
    parser.add_argument("--blocks", nargs="+", default=[])
    parser.add_argument("--anchored", help="an anchored model, timed with its anchor network run more and less often")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--texts", type=int, default=0, help="texts to keep of each run with the most rows")
    parser.add_argument("--short", action="store_true", help="only the samplers that take one pass for many tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for model in filter(None, (options.causal, *options.blocks, options.anchored)):
        lm = adlm.load(model, device)
        is_anchored = model == options.anchored
        for sampler in anchored_samplers(lm) if is_anchored else samplers_of(lm, options.short):
            for shaping in SHAPINGS[:1] if is_anchored else SHAPINGS:
                for num_rows in options.rows:
                    texts = options.texts if num_rows == max(options.rows) else 0
                    result = {"model": model, **timed(lm, num_rows, sampler | shaping, texts)}
                    print(json.dumps({key: value for key, value in result.items() if key != "texts"}), flush=True)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(result) + "\n")


def samplers_of(lm: LanguageModel, short: bool) -> list[dict[str, object]]:
    if lm.method.exact:
        return [{"sampler": "ancestral"}]
    length = lm.config.model.block_length
    runs: list[dict[str, object]] = [{"sampler": "speculative"}]
    if lm.config.model.chain:
        runs += [{"sampler": "speculative", "verify": False}]
    if not short:
        runs += [{"sampler": "confidence", "steps": steps} for steps in (length, length // 2, length // 4)]
        runs += [{"sampler": "threshold", "threshold": 0.8}, {"sampler": "left-to-right"}]
    return runs


def anchored_samplers(lm: LanguageModel) -> list[dict[str, object]]:
    length = lm.config.model.block_length
    return [
        {"sampler": sampler, "steps": length, "anchor_every": every}
        for sampler in ("ancestral", "left-to-right")
        for every in (1, length // 2, length)
    ]


if __name__ == "__main__":
    main()
