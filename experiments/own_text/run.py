"""Own text: training from the model in the box against training from scratch, in bits per byte of the held-out end.

    python experiments/own_text/run.py TEXT... --out results.jsonl [--jobs 4] [--only scratch]

Each trial is one `adlm train own`, whose command is in its line of the results, and then a bound with 4 replicates; of
smollm2 the exact likelihood of its causal copy. The tokenizers differ, so bits per byte are compared. Finished trials
in results.jsonl are not repeated.
"""

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

import adlm
from adlm import code_commit
from adlm.data.prepare.prepared import open_prepared
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import summarize

SEEDS = (0, 1)
RATES = {"muon": ("1e-4", "2e-4", "5e-4", "1e-3", "2e-3", "4e-3"), "adamw": ("1e-4", "3e-4", "1e-3", "2e-3")}
SAME_AS_CPU = ("train.precision=float32", "train.compile=off")


def trials() -> Iterator[tuple[str, list[str]]]:
    """Name and overrides of `adlm train own`."""
    for seed in SEEDS:
        yield f"scratch-seed{seed}", [f"train.seed={seed}"]
        yield f"box-seed{seed}", ["init=box", f"train.seed={seed}"]
        yield f"smollm2-seed{seed}", ["init=smollm2", f"train.seed={seed}"]
        for optimizer, rates in RATES.items():
            for rate in rates:
                for steps in (100, 200, 400):
                    words = [f"train.optimizer={optimizer}", f"train.learning_rate={rate}", f"train.steps={steps}"]
                    name = f"box-{optimizer}-{rate}-{steps}-seed{seed}"
                    yield name, ["init=box", *words, "train.batch_size=16", f"train.seed={seed}"]
        for t_min in ("0.001", "0.3"):
            words = ["init=box", "train.learning_rate=1e-3", "train.steps=200", "train.batch_size=16"]
            yield f"box-t-min-{t_min}-seed{seed}", [*words, f"time.t_min={t_min}", f"train.seed={seed}"]


def run_trial(text: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["own", *overrides, f"data.path={text}", "train.sample_every=0", "train.valid_every=0", *SAME_AS_CPU]
        command = [sys.executable, "-m", "adlm", "train", *words, "--out", str(run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        shown = ["adlm", "train", *(word for word in words if not word.startswith("data.path="))]
        measured = {"text": text.name, "trial": name, "command": " ".join([*shown, f"data.path={text.name}"])}
        model = adlm.load(run, "auto")
        result = {**measured, **bits_per_byte(model, run / "data"), "samples": model.sample(2, seed=0)}
        untrained = {"box-seed0": "box", "smollm2-seed0": "smollm2"}.get(name)
        if untrained is not None:
            result[f"{untrained}_as_it_is"] = bits_per_byte(adlm.load(untrained, "auto"), run / "data")
        return {**result, "commit": code_commit()}


def bits_per_byte(model: Any, data: Path) -> dict[str, float]:
    prepared = open_prepared(data)
    tokens = prepared.tokens("valid")
    ids = np.zeros(len(tokens), np.int64)
    tokens.copy_to(ids, 0, len(ids))
    num_bytes = len(prepared.tokenizer.decode(ids.tolist(), special_tokens=False).encode())
    settings = PerplexitySettings("causal") if model.config.model.block_length else PerplexitySettings("any-order", 4)
    estimate = summarize(measure_nats(model.method, model.network, prepared.rows("valid"), settings))
    scale = estimate.tokens / math.log(2) / num_bytes
    return {
        "bits_per_byte": estimate.nats * scale,
        "monte_carlo": (estimate.monte_carlo or 0.0) * scale,
        "nats_per_token": estimate.nats,
        "tokens": estimate.tokens,
        "bytes": num_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of the names of trials")
    arguments = parser.parse_args()
    done = arguments.out.read_text().splitlines() if arguments.out.is_file() else []
    finished = {(line["text"], line["trial"]) for line in map(json.loads, done)}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, spawn) as pool, arguments.out.open("a") as out:
        pending = [
            pool.submit(run_trial, text, name, overrides)
            for name, overrides in trials()
            for text in arguments.texts
            if name.startswith(tuple(arguments.only)) and (text.name, name) not in finished
        ]
        for future in as_completed(pending):
            result = future.result()
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()
            print(
                f"{result['text']}  {result['trial']:32}  {result['bits_per_byte']:.4f} ± {result['monte_carlo']:.4f}"
            )


if __name__ == "__main__":
    main()
