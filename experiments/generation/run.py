"""ADLM, MDLM and AR of twelve blocks, trained on the same Wikipedia text, write 1,024 texts in several ways; an AR
model of our own that was trained for longer judges them. One GPU.

python experiments/generation/run.py train PREPARED --out runs/generation
python experiments/generation/run.py measure PREPARED --out runs/generation [--num 1024] [--jobs 4]
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The same rate, batch and text for all; the diffusion models begin where neighbours can be looked at
COMMON = [
    *("train.learning_rate=1.5e-3", "train.warm_up_steps=80", "train.decay=cosine", "train.ema=0.995"),
    *("train.log_every=50", "train.valid_every=0", "train.sample_every=0", "train.keep=1"),
    *("train.snapshot_every=100000", "model.dropout=0.0", "train.unigram_start=true"),
]
DIFFUSION = ["schedule.eps=0", "model.start=neighbours"]
MODELS = {
    "adlm": ["owt/adlm", "model=tiny", "model.bridge=hidden", "anchor.gamma=0.1", "anchor.warm_up=false", *DIFFUSION],
    "mdlm": ["owt/mdlm", "model=tiny", "model.blocks=12", *DIFFUSION],
    "judge": ["owt/ar", "model=tiny", "model.blocks=12"],
    "ar": ["owt/ar", "model=tiny", "model.blocks=12", "train.seed=1", "train.steps=400", "train.ema=0.99"],
}
STEPS = {"ancestral": (16, 64, 256), "remdm-loop": (64, 256, 512)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["train", "measure"])
    parser.add_argument("prepared")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=1024, help="texts of each way of writing")
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument("--jobs", type=int, default=4, help="ways of writing side by side")
    parser.add_argument("words", nargs="*", help="knobs for every model")
    arguments = parser.parse_intermixed_args()
    {"train": train, "measure": measure}[arguments.do](arguments)


def train(arguments: argparse.Namespace) -> None:
    source = json.loads(Path(arguments.prepared, "manifest.json").read_text())["source"]
    for name, (preset, *words) in MODELS.items():
        text = [f"data.path={source}", f"data.prepared={arguments.prepared}", "data.packing=packed", "length=256"]
        amount = ["train.batch_size=512", f"train.steps={arguments.steps}"]
        knobs = [preset, *text, *amount, *COMMON, *words, *arguments.words]
        said(name, "train", *knobs, "--out", str(arguments.out / name), "--json")


def measure(arguments: argparse.Namespace) -> None:
    """The bounds first, then every way of writing: samples/NAME.jsonl and cards/NAME.json."""
    out = arguments.out
    models = [str(out / name) for name in ("adlm", "mdlm", "ar", "judge")]
    said("bounds", "perplexity", *models, "--data", arguments.prepared, "--samples", "4", "--json")
    ways = [("ar", "left-to-right", 0)]
    ways += [(model, sampler, steps) for model in ("adlm", "mdlm") for sampler in STEPS for steps in STEPS[sampler]]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda way: write_and_judge(arguments, *way), reversed(ways)))  # the longest first


def write_and_judge(arguments: argparse.Namespace, model: str, sampler: str, steps: int) -> None:
    out, how = arguments.out, ["--sampler", sampler, "--steps", str(steps)] if steps else []
    name = f"{model}-{sampler}-{steps}" if steps else model
    samples, card = str(out / "samples" / f"{name}.jsonl"), str(out / "cards" / f"{name}.json")
    Path(samples).parent.mkdir(parents=True, exist_ok=True)
    words = ["--num", str(arguments.num), "--batch", "128", *how, "sampling.top_p=0.9", "--out", samples, "--json"]
    said(f"{name}: samples", "sample", str(out / model), *words)
    against = ["--model", str(out / "judge"), "--reference", arguments.prepared]
    whole = [] if steps else ["--judge-reference"]
    metrics = ["--metrics", "perplexity,entropy,diversity", "--batch", "64", "--out", card, "--json"]
    said(f"{name}: card", "judge", samples, *against, *whole, *metrics)


def said(title: str, *words: str) -> None:
    """Runs a command of ours; prints what it answered and how long it took, in one line."""
    began = time.monotonic()
    command = [sys.executable, "-m", "adlm.interfaces.cli", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"failed": run.stderr[-1500:]}
    print(json.dumps({"what": title, "seconds": round(time.monotonic() - began, 1), "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
