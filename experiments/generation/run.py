"""ADLM, MDLM and two controls of twelve blocks, three seeds of the first two, trained on the same Wikipedia text; an AR
model of ours judges what they write. One GPU.

python experiments/generation/run.py train PREPARED --out runs/generation [--models adlm mdlm --seeds 0 1 2 --jobs 2]
python experiments/generation/run.py bounds PREPARED --out runs/generation
python experiments/generation/run.py write PREPARED --out runs/generation [--num 1024] [--jobs 4]
"""

import argparse
import itertools
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
    *("train.checkpoint_every=100000", "model.dropout=0.0", "train.unigram_start=true"),
]
DIFFUSION = ["schedule.eps=0", "model.start=neighbours"]
ADLM = ["owt/adlm", "model=tiny", "model.bridge=hidden", "anchor.gamma=0.1", "anchor.warm_up=false", *DIFFUSION]
MODELS = {
    "adlm": ADLM,
    "mdlm": ["owt/mdlm", "model=tiny", "model.blocks=12", *DIFFUSION],
    "adlm-gamma0": [*ADLM, "anchor.gamma=0"],  # the same two networks, without the anchor loss
    "adlm-all": [
        *ADLM,
        "anchor.tau=100000",
    ],  # every token is an anchor: the middle of the network is supervised, no more
    "judge": ["owt/ar", "model=tiny", "model.blocks=12"],
}
STEPS = {"ancestral": (16, 64, 256), "remdm-loop": (64, 256, 512)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["train", "bounds", "write"])
    parser.add_argument("prepared")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--num", type=int, default=1024, help="texts of each sampler and number of steps")
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument("--jobs", type=int, default=4, help="commands side by side")
    parser.add_argument("words", nargs="*", help="overrides of every model")
    arguments = parser.parse_intermixed_args()
    {"train": train, "bounds": bounds, "write": write}[arguments.do](arguments)


def train(arguments: argparse.Namespace) -> None:
    """runs/generation/MODEL-SEED for every model and seed."""
    source = json.loads(Path(arguments.prepared, "manifest.json").read_text())["source"]
    text = [f"data.path={source}", f"data.prepared={arguments.prepared}", "data.packing=packed", "length=256"]
    amount = ["train.batch_size=512", f"train.steps={arguments.steps}"]

    def run(name: str, seed: int) -> None:
        preset, *words = MODELS[name]
        overrides = [preset, *text, *amount, *COMMON, *words, f"train.seed={seed}", *arguments.words]
        run_adlm(f"{name}-{seed}", "train", *overrides, "--out", str(arguments.out / f"{name}-{seed}"), "--json")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, *zip(*itertools.product(arguments.models, arguments.seeds), strict=True)))


def bounds(arguments: argparse.Namespace) -> None:
    """Every model that was trained on the same rows and draws, the first against each other one."""
    models = [str(folder) for folder in sorted(arguments.out.glob("*-[0-9]"))]
    run_adlm("bounds", "perplexity", *models, "--data", arguments.prepared, "--samples", "4", "--json")


def write(arguments: argparse.Namespace) -> None:
    """Every sampler and number of steps, first seed: samples/NAME.jsonl and cards/NAME.json."""
    ways = [(model, sampler, steps) for model in ("adlm", "mdlm") for sampler in STEPS for steps in STEPS[sampler]]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda way: write_and_judge(arguments, *way), reversed(ways)))  # the longest first


def write_and_judge(arguments: argparse.Namespace, model: str, sampler: str, steps: int) -> None:
    out, name = arguments.out, f"{model}-{sampler}-{steps}"
    samples, card = str(out / "samples" / f"{name}.jsonl"), str(out / "cards" / f"{name}.json")
    Path(samples).parent.mkdir(parents=True, exist_ok=True)
    how = ["--sampler", sampler, "--steps", str(steps), "sampling.top_p=0.9"]
    words = ["--num", str(arguments.num), "--batch", "128", *how, "--out", samples, "--json"]
    run_adlm(f"{name}: samples", "sample", str(out / f"{model}-0"), *words)
    against = ["--model", str(out / "judge-0"), "--reference", arguments.prepared, "--judge-reference"]
    metrics = ["--metrics", "perplexity,entropy,diversity", "--batch", "64", "--out", card, "--json"]
    run_adlm(f"{name}: card", "judge", samples, *against, *metrics)


def run_adlm(title: str, *words: str) -> None:
    """Runs a command of ours; prints what it answered and how long it took, in one line."""
    began = time.monotonic()
    command = [sys.executable, "-m", "adlm", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"failed": run.stderr[-1500:]}
    print(json.dumps({"what": title, "seconds": round(time.monotonic() - began, 1), "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
