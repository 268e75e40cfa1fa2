"""Does a memory of the last sampling step help? Quickstart models on one CPU core, trained 200 steps more.

    python experiments/memory/run.py --data PREPARED --out OUT > experiments/memory/results.jsonl
    python experiments/memory/run.py --table experiments/memory/results.jsonl

PREPARED is the text of `adlm quickstart`. OUT gets the runs, which are kept: a rerun trains what is missing. There is
one line of results for a model and a number of sampling steps: the bound of held-out text by the estimator `path`, and
of 512 texts the entropy and the nats by a bigram model of the training text, which is the judge.
"""

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_rel

from adlm import load
from adlm.apps.judge.diversity import entropy_of
from adlm.cli.main import main
from adlm.config.schema import Sampling
from adlm.data.prepare.prepared import Prepared, open_prepared
from adlm.inference.frozen import FrozenNetwork
from adlm.language_model import LanguageModel
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.ngrams import ngram_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import summarize
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

METHODS, SEEDS, STEPS = ("mdlm", "adlm"), (0, 1, 2), (16, 64)
KINDS = {"more": (), "memory": ("model.memory=true",)}
"""Without and with memory: the options of the 200 steps."""
ROWS, TEXTS = 256, 512
COMMON = (
    "schedule.eps=0 train.threads=1 train.device=cpu train.samples=1 train.sample_every=0 train.valid_every=0 "
    "train.checkpoint_every=1000000"
)
MORE = (
    "time.t_min=0.1 sampling.steps=64 train.steps=200 train.batch_size=32 train.learning_rate=2e-3 train.beta2=0.98 "
    "train.warm_up_steps=20 train.decay=linear train.ema=0.98"
)


def train(arguments: argparse.Namespace) -> None:
    common = [f"data.prepared={arguments.data}", *COMMON.split()]
    for seed in SEEDS:
        for method in METHODS:
            base, own = arguments.out / f"{method}-{seed}", f"train.seed={seed}"
            if not base.exists():
                run(f"quickstart/{method}", *common, own, "--out", str(base))
            for kind, options in KINDS.items():
                out = arguments.out / f"{method}-{seed}-{kind}"
                if not out.exists():
                    run(f"init={base}", *common, *MORE.split(), own, *options, "--out", str(out))
                measure(out, open_prepared(arguments.data), {"method": method, "seed": seed, "kind": kind})


def run(*words: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        assert main(["train", *words]) == 0


def measure(out: Path, prepared: Prepared, what: dict[str, Any]) -> None:
    lm = load(out)
    for steps in STEPS:
        settings = PerplexitySettings("path", samples=1, max_tokens=ROWS * lm.config.length, order_steps=steps)
        nats = summarize(measure_nats(lm.method, lm.network, prepared.rows("valid"), settings)).nats
        ids, is_text = texts(lm, steps)
        judged = ngram_nats(prepared.rows("train").in_parts(), [(ids, is_text)], prepared.tokenizer.vocabulary.size)
        entropy = entropy_of([row[text] for row, text in zip(ids, is_text, strict=True)]).value
        line = {**what, "steps": steps, "nats": nats, "bigram_nats": judged.bigram, "entropy": entropy}
        print(json.dumps(line), flush=True)


def texts(lm: LanguageModel, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (R, L) of sampled rows, and where they are text."""
    vocabulary = lm.require_tokenizer().vocabulary
    canvas = torch.full((TEXTS, lm.config.length), vocabulary.mask_id)
    frames = lm.method.generate(FrozenNetwork(lm.network), canvas, Sampling(steps=steps), RowRng(0, range(TEXTS)))
    ids = last_frame(frames).ids.numpy()
    return ids, (ids != vocabulary.bos_id) & (ids != vocabulary.eos_id)


def table(path: Path) -> None:
    lines = {
        tuple(each[key] for key in ("method", "steps", "kind", "seed")): each for each in map(json.loads, path.open())
    }
    print("| method | steps | of | without | with memory | difference | p |\n|---|---|---|---|---|---|---|")
    for method in METHODS:
        for steps in STEPS:
            for name, key in (("bound", "nats"), ("bigram perplexity", "bigram_nats"), ("entropy", "entropy")):
                pairs = np.array([[lines[method, steps, kind, seed][key] for kind in KINDS] for seed in SEEDS])
                differences = pairs[:, 1] - pairs[:, 0]
                error = differences.std(ddof=1) / math.sqrt(len(SEEDS))
                means = np.exp(pairs.mean(axis=0)) if key == "bigram_nats" else pairs.mean(axis=0)
                shown = " | ".join(f"{mean:.1f}" if key == "bigram_nats" else f"{mean:.4f}" for mean in means)
                p = ttest_rel(pairs[:, 1], pairs[:, 0]).pvalue
                print(f"| {method} | {steps} | {name} | {shown} | {differences.mean():+.4f} ± {error:.4f} | {p:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
    else:
        train(arguments)
