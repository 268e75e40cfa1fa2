"""Sliding windows with and without the bos and eos around training rows: how often bos or eos lands inside a text.

python experiments/window_boundaries/run.py runs/quickstart        (a folder of `adlm quickstart`; about two minutes)

Texts of four rows' length are sampled semi-autoregressively: windows read between bos and eos, as `adlm sample` reads
them, and bare windows of the model's length. What is counted is the share of special tokens among the tokens sampled,
beside their share in the held-out text, where eos ends a document, and inside single rows sampled at once.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import adlm
from adlm.data.prepare.prepared import open_prepared
from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import as_denoiser
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import SamplingRun, last_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sample_windows, steps_of, with_boundaries

TEXTS, STEPS = 64, 64


def main() -> None:
    folder = Path(sys.argv[1])
    prepared = open_prepared(folder / "data")
    tokens = prepared.rows("valid").tokens
    held_out = np.empty(len(tokens), np.int64)
    tokens.copy_to(held_out, 0, len(tokens))
    print(f"held out: {per_thousand(held_out, sorted(prepared.tokenizer.special_ids))} special tokens of 1000")
    for name in ("adlm", "mdlm"):
        lm = adlm.load(folder / name)
        bos, eos = vocabulary_of(lm.config).row_boundaries
        length = lm.config.length
        rows = sampled(lm, length - 2, bos, eos, texts=4 * TEXTS)
        print(f"{name} one row between bos and eos: {per_thousand(rows, bos + eos)} of 1000")
        for kind, before, after in (("bare", [], []), ("framed", bos, eos)):
            ids = sampled(lm, 4 * length, before, after)
            where = np.flatnonzero(np.isin(ids, bos + eos).any(axis=0))
            print(f"{name} {kind}: {per_thousand(ids, bos + eos)} of 1000, at places {where.tolist()}", flush=True)


def sampled(lm: LanguageModel, length: int, before: list[int], after: list[int], texts: int = TEXTS) -> np.ndarray:
    """(texts, length) ids through windows that are read between `before` and `after`."""
    sampling = lm.sampling(sampler="semi-autoregressive", steps=STEPS)
    denoiser = as_denoiser(lm.frozen, lm.mask_id, lm.method.conditioning_sigma)
    steps = steps_of(lm.method.schedule, sampling)
    draws = RowRng(0, range(texts))
    window = with_boundaries(
        lambda part: sample_positions_first(SamplingRun(denoiser, part, lm.mask_id, steps, sampling, draws)),
        before,
        after,
    )
    width = lm.config.length - len(before) - len(after)
    canvas = torch.full((texts, length), lm.mask_id)
    return last_frame(sample_windows(window, canvas, lm.mask_id, width, lm.config.length // 2)).ids.numpy()


def per_thousand(ids: np.ndarray, special: list[int]) -> str:
    """The share of special ids, and its standard error over texts where there are several."""
    shares = 1000 * np.isin(ids, special).mean(axis=-1)
    return f"{shares.mean():.2f}" + (f" ± {shares.std(ddof=1) / len(shares) ** 0.5:.2f}" if shares.ndim else "")


if __name__ == "__main__":
    with torch.no_grad():
        main()
