"""Kill -9 a CPU run at 20 random moments, resume each time, and compare with the unbroken run, bit by bit.

python experiments/kill_train/run.py --out /tmp/kills --kills 20
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from adlm.training.metrics import TIMING_METRICS, read_metrics

KNOBS = Path(__file__).parent / "small.yaml"


def text(folder: Path) -> Path:
    """Lines of words in pairs."""
    pairs = ["sun moon", "king queen", "war peace", "law order", "day night"]
    chance, path = random.Random(0), folder / "rhymes.txt"
    path.write_text("\n".join(" ".join(chance.choices(pairs, k=4)) for _ in range(2000)))
    return path


def command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "adlm", "train", str(KNOBS), f"data.path={source}", "--out", str(out)]


def logged(out: Path) -> list[dict[str, object]]:
    lines = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMING_METRICS} for line in lines]


def step_of(out: Path) -> int:
    lines = read_metrics(out / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    source, whole, killed = text(arguments.out), arguments.out / "unbroken", arguments.out / "killed"
    started = time.monotonic()
    subprocess.run(command(source, whole), check=True, capture_output=True)
    print(f"unbroken run: {step_of(whole)} steps in {time.monotonic() - started:.1f} s, start included")
    chance, kills = random.Random(arguments.seed), 0
    while kills < arguments.kills:
        with (arguments.out / "killed.log").open("a") as log:
            process = subprocess.Popen(command(source, killed), stdout=log, stderr=log)
            wait = chance.uniform(0, 6)  # any moment, the start and the preparation included
            if chance.random() < 0.8:  # or once it has trained some more
                target = step_of(killed) + chance.randint(1, 35)
                while process.poll() is None and step_of(killed) < target:
                    time.sleep(0.01)
                wait = chance.uniform(0, 0.4)
            try:
                process.wait(wait)
                print("the run came to its end before it was killed often enough; make it longer")
                return 1
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        kills += 1
        there = ", ".join(sorted(place.name for place in killed.glob("checkpoints/*"))) or "none"
        print(f"kill {kills:2}: last line step {step_of(killed):3}, checkpoints {there}", flush=True)
    subprocess.run(command(source, killed), check=True, capture_output=True)
    same = {
        "weights that are kept": _equal(whole / "model", killed / "model"),
        "best weights": _equal(whole / "best", killed / "best"),
        "all trained tensors (checksums of the last checkpoint)": _checksums(whole) == _checksums(killed),
        "metrics.jsonl, clocks and rates aside": logged(whole) == logged(killed),
        "no gap and no repeat": [line["step"] for line in logged(killed)] == [line["step"] for line in logged(whole)],
        "sample texts": _texts(whole) == _texts(killed),
    }
    for what, equal in same.items():
        print(f"{what}: {'identical' if equal else 'DIFFERENT'}")
    print(f"{kills} kills, {time.monotonic() - started:.0f} s in all, torch {torch.__version__}")
    return 0 if all(same.values()) else 1


def _equal(one: Path, other: Path) -> bool:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _checksums(out: Path) -> object:
    place = max((out / "checkpoints").glob("step-*"))
    return json.loads((place / "checkpoint.json").read_text())["files"]


def _texts(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (out / "samples").iterdir()}


if __name__ == "__main__":
    sys.exit(main())
