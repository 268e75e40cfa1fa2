"""The quickstart with several training seeds, some at once: how far ADLM and MDLM are apart, and how far seeds are.

python experiments/quickstart/seeds.py --out runs/seeds [--seeds 5] [--jobs 5] [data.path=moby-dick.txt ...]
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

REPORTED = ("adlm", "mdlm", "unigram_nats", "bigram_nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="quickstarts side by side")
    parser.add_argument("words", nargs="*", help="knobs of the quickstart")
    arguments = parser.parse_intermixed_args()

    def run(seed: int) -> dict[str, float]:
        words = [f"train.seed={seed}", *arguments.words, "--out", str(arguments.out / str(seed))]
        command = [sys.executable, "-m", "adlm", "quickstart", *words, "--json"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(f"seed {seed} ended with {done.returncode}: {done.stderr[-2000:]}")
        report = json.loads((arguments.out / str(seed) / "report.json").read_text())
        print(json.dumps({"seed": seed, **{key: report[key] for key in REPORTED}}), flush=True)
        return {"adlm": report["adlm"]["nats"], "mdlm": report["mdlm"]["nats"]}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(run, range(arguments.seeds)))
    for model in ("adlm", "mdlm"):
        nats = [each[model] for each in found]
        print(f"{model} {mean(nats):.4f}, between seeds {stdev(nats):.4f}")
    apart = [each["adlm"] - each["mdlm"] for each in found]
    print(
        f"adlm minus mdlm {mean(apart):+.4f} +- {stdev(apart) / len(apart) ** 0.5:.4f} over {len(apart)} pairs of seeds"
    )


if __name__ == "__main__":
    main()
