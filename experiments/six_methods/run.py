"""Do all six methods learn the quickstart's speeches? Each by the same command, its bound beside the unigram entropy.

python experiments/six_methods/run.py [--steps 250]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from adlm.config.load import resolve
from adlm.data.prepare.prepare import prepare
from adlm.likelihood.ngrams import ngram_nats

# SEDD and D3PM are conditioned on the time, so their noise must be finite at t = 1; D3PM has discrete time
WORDS = {
    "adlm": ["quickstart/adlm"],
    "mdlm": ["quickstart/mdlm"],
    "sedd": ["quickstart/mdlm", "method=sedd", "schedule.eps=1e-3", "model.time_conditioning=true"],
    "d3pm": ["quickstart/mdlm", "method=d3pm", "schedule.eps=1e-3", "model.time_conditioning=true", "time.steps=100"],
    "ar": ["quickstart/mdlm", "method=ar"],
    "a2r": ["quickstart/adlm", "method=a2r"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(resolve(["quickstart/adlm"]), Path(folder, "data")).prepared
        train, valid = (prepared.rows(split).in_parts() for split in ("train", "valid"))
        counted = ngram_nats(train, valid, prepared.tokenizer.vocabulary.size)
        print(f"unigrams {counted.unigram:.4f}, bigrams {counted.bigram:.4f} nats a token", flush=True)
        for method, words in WORDS.items():
            overrides = [
                f"data.prepared={folder}/data",
                f"train.steps={steps}",
                "train.valid_every=0",
                "train.valid_rows=3000",
            ]
            command = [
                sys.executable,
                "-m",
                "adlm.cli.main",
                "train",
                *words,
                *overrides,
                "--out",
                f"{folder}/{method}",
            ]
            run = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(f"{method} ended with {run.returncode}: {run.stderr[-2000:]}")
            result = json.loads(run.stdout)
            below = result["nats"] + 2 * result["stderr"] < counted.unigram
            print(
                f"{method:5} {result['nats']:.4f} ± {result['stderr']:.4f} after {result['tokens']:,} tokens: "
                f"{'below' if below else 'NOT below'} the unigrams",
                flush=True,
            )


if __name__ == "__main__":
    main()
