"""How often greedy text of draft and verify differs from that of the causal model, in the precision of the device.

    python experiments/adapt/greedy.py runs/blocks4 --text valid.txt --out greedy.json

In float64 they are equal (tests/methods/test_block_causal.py). In bfloat16 a call that reads several tokens rounds
otherwise than one that reads a single token, and where two tokens are almost equally likely another one may win.
Prompts are the beginnings of the documents of a text. Texts are compared up to their first difference: after it they
are different texts.
"""

import argparse
import json
from pathlib import Path

import torch

import adlm
from adlm.canvas import Canvas
from adlm.methods.inputs import vocabulary_of
from adlm.sampling.frame import last_frame
from adlm.sampling.settings import SampleSettings, sampling_with

PROMPT, NEW = 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lm = adlm.load(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, rows = lm.require_tokenizer(), []
    for document in options.text.read_text(encoding="utf-8").split("\n\n"):
        ids = tokenizer.encode(document)[:PROMPT]
        if len(ids) == PROMPT:
            rows.append([*vocabulary_of(lm.config).row_boundaries[0], *ids] + [lm.mask_id] * NEW)
    canvas = Canvas(torch.tensor(rows[: options.rows]))

    def greedy(drafts: int) -> torch.Tensor:
        settings = {"sampler": "speculative", "temperature": 0.0, "drafts": drafts, "stop_at_eos": False}
        sampling = sampling_with(lm.config.sampling, settings)
        return last_frame(lm.plan(SampleSettings(sampling, canvas=canvas, seed=0)).frames()).ids[:, -NEW:].cpu()

    same = (greedy(0) == greedy(lm.config.model.block_length - 1)).long()
    before = same.cumprod(dim=1).sum(dim=1)
    num_different = int((before < NEW).sum())
    result = {
        "model": options.model,
        "texts": len(before),
        "texts_that_differ": num_different,
        "tokens_compared": int(before.sum()) + num_different,
        "share_of_differing_tokens": round(num_different / (int(before.sum()) + num_different), 6),
    }
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
