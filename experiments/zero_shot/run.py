"""ADLM, MDLM and AR of the small size, each trained on the same Wikipedia text for a few minutes, then measured
zero-shot on Penn Treebank, WikiText-2, LAMBADA and AG News. One GPU; $ADLM_DATA holds the four sets.

python experiments/zero_shot/run.py PREPARED [--steps 460] [--seconds 540]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETS = ["ptb", "wikitext2", "lambada", "ag_news"]
# The same start, rate and text for all; ADLM with the hidden bridge and a stronger anchor loss
COMMON = [
    *("train.batch_size=64", "train.learning_rate=1e-3", "train.warm_up_steps=50", "train.decay=cosine"),
    *("train.ema=0.995", "train.log_every=50", "train.valid_every=0", "train.sample_every=0", "train.keep=1"),
    *("train.checkpoint_every=100000", "model.dropout=0.0", "train.unigram_start=true"),
]
DIFFUSION = ["schedule.eps=0", "model.start=neighbours"]
MODELS = {
    "adlm": ["owt/adlm", "model.bridge=hidden", "anchor.gamma=0.1", "anchor.warm_up=false", *DIFFUSION],
    "mdlm": ["owt/mdlm", *DIFFUSION],
    "ar": ["owt/ar"],
    "mdlm-18": ["owt/mdlm", "model.blocks=18", *DIFFUSION],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared")
    parser.add_argument("--steps", type=int, default=460)
    parser.add_argument("--seconds", type=float, default=540, help="no model is begun that would not end by then")
    parser.add_argument("words", nargs="*", help="overrides of every model")
    arguments = parser.parse_intermixed_args()
    source = json.loads(Path(arguments.prepared, "manifest.json").read_text())["source"]
    began, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, words in MODELS.items():
            start = time.monotonic()
            if start - began + 1.1 * longest > arguments.seconds:
                print(json.dumps({"model": name, "left_out": "no time left"}), flush=True)
                continue
            text = [f"data.path={source}", f"data.prepared={arguments.prepared}", "data.packing=packed"]
            overrides = [*text, f"train.steps={arguments.steps}", *COMMON, *arguments.words]
            trained = adlm("train", *words, *overrides, "--out", f"{folder}/{name}", "--json")
            print(json.dumps({"model": name, "trained": trained, "seconds": time.monotonic() - start}), flush=True)
            how = ["--samples", "2", "--estimator", "any-order", "--batch", "32", "--json"]
            figures = adlm("perplexity", f"{folder}/{name}", "--data", *SETS, *how)
            print(json.dumps({"model": name, "figures": figures, "seconds": time.monotonic() - start}), flush=True)
            longest = max(longest, time.monotonic() - start)


def adlm(*words: str) -> object:
    run = subprocess.run([sys.executable, "-m", "adlm", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        return {"failed": run.returncode, "because": run.stderr[-1500:]}
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
