"""What the text after a hole is worth: nats per token of 8 missing tokens, given both sides or the text before alone.

    python experiments/adapt/holes.py smollm2 --text valid.txt --out holes.jsonl

The hole is in the middle of the first tokens of a document. The nats are exact, those of the causal copy. With
--candidates also the share of two missing tokens that fills have right, for numbers of candidates.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import adlm
from adlm.canvas import Canvas
from adlm.data.rows.holes import RowHole, arrange
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.sampling.frame import last_frame
from adlm.sampling.settings import SampleSettings, sampling_with

HOLE = 8


@torch.no_grad()
def nats(lm: LanguageModel, ids: list[int], stop: int) -> float:
    """Per token of the HOLE tokens before `stop`, each given all before it."""
    row = torch.tensor([ids[:stop]], device=lm.device)
    log_beliefs = clean_log_beliefs(lm.network.causal_logits(row), lm.mask_id)[0, stop - HOLE :]
    return -float(log_beliefs.gather(1, row[0, stop - HOLE :, None]).mean())


def restored(lm: LanguageModel, rows: list[list[int]], start: int, candidates: int, batch: int = 16) -> list[float]:
    """Of each row, the share of two tokens from `start` on that a fill has right, with the model's own sampling."""
    sampling, shares = sampling_with(lm.config.sampling, {"candidates": candidates}), []
    for first in range(0, len(rows), batch):
        ids = torch.tensor(rows[first : first + batch])
        canvas = ids.clone()
        canvas[:, start : start + 2] = lm.mask_id
        filled = last_frame(lm.plan(SampleSettings(sampling, canvas=Canvas(canvas), seed=first)).frames()).ids.cpu()
        shares += (filled == ids)[:, start : start + 2].float().mean(dim=1).tolist()
    return shares


def mean_and_error(values: list[float]) -> list[float]:
    return [round(float(np.mean(values)), 3), round(float(np.std(values, ddof=1) / len(values) ** 0.5), 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", default="", help="how to name it in the results")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num", type=int, default=64, help="documents")
    parser.add_argument("--lengths", type=int, nargs="+", default=(40, 120, 240))
    parser.add_argument("--candidates", type=int, nargs="*", default=())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lm = adlm.load(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, vocabulary, hole_id = lm.require_tokenizer(), vocabulary_of(lm.config), lm.config.model.hole_id
    eos_id = vocabulary.eos_id
    assert hole_id is not None, "this model does not infill"
    assert eos_id is not None
    before = list(vocabulary.row_boundaries[0])
    documents = [tokenizer.encode(text) for text in options.text.read_text(encoding="utf-8").split("\n\n")]
    for length in options.lengths:
        found, start = [], len(before) + (length - HOLE) // 2
        rows = [[*before, *ids[:length]] for ids in documents if len(ids) >= length][: options.num]
        for row in rows:
            results = [nats(lm, row, start + HOLE)]
            for is_known in (True, False):
                hole = [RowHole(start, start + HOLE, is_known)]
                arranged = arrange(np.array(row), hole, hole_id, eos_id)[0].tolist()
                results.append(nats(lm, arranged, len(arranged) - 1))
            found.append(results)
        alone, both, unknown = (list(values) for values in zip(*found, strict=True))
        result = {
            "model": options.name or options.model,
            "length": length,
            "texts": len(found),
            "before_alone": mean_and_error(alone),
            "both_sides": mean_and_error(both),
            "both_sides_unknown_length": mean_and_error(unknown),
            "gain": mean_and_error([one - other for one, other in zip(alone, both, strict=True)]),
            "restored": {num: mean_and_error(restored(lm, rows, start, num)) for num in options.candidates},
        }
        print(json.dumps(result), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
