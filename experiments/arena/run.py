"""The arena: what of ADLM is anchoring, what is deep supervision, what is the bridge. One runner for all its models.

    adlm prepare data.path=enwiki.txt data.boundary=blank tokenizer=bpe-8192 length=256 --out PREPARED
    python experiments/arena/run.py rows                       # models, parameters, overrides
    python experiments/arena/run.py run --data PREPARED --out runs/arena --results RESULTS --seconds 560
    python experiments/arena/run.py run --data PREPARED --out runs/arena --results RESULTS --only control adlm-tied
    python experiments/arena/run.py table --results RESULTS
    python experiments/arena/run.py plot --results RESULTS --out FIGURES

The models are in arena_rows.py. `run` trains the next ones that have no result, each by `adlm train`, measures the
bound on all of PREPARED's held-out rows, and writes one JSON file per trial. It starts none that is not expected to
end within --seconds; rerun the command to go on. `--only` takes groups, rows and trials (adlm-seed1). --extra
train.steps=4000 applies to all trials, and needs another --results. The group `smoke` runs on a CPU in less than a
minute, and only if it is named. The results so far are in experiments/arena/results.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arena_report import markdown, nats_as_json, plot_groups, read_results, stderr_of
from arena_rows import GROUPS, NUM_SYMBOLS, Trial, trials_of

from adlm import load
from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.data.prepare.prepared import open_prepared
from adlm.distributed import device_name, local_device
from adlm.errors import UserError
from adlm.files import write_file
from adlm.likelihood.estimate import summarize
from adlm.likelihood.perplexity import PerplexitySettings, measure_nats
from adlm.likelihood.text_sets import text_sets
from adlm.methods import method_of
from adlm.models.meta import on_meta
from adlm.models.transformer import num_parameters
from adlm.training.metrics import read_metrics

MARGIN = 1.1
"""A trial is expected to take this many times as long as the longest one so far."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rows", help="print the trials, their parameters and overrides").set_defaults(do=print_rows)
    run = commands.add_parser("run", help="train and measure the trials that have no result")
    run.add_argument("--data", type=Path, required=True, help="prepared folder with the splits train and valid")
    run.add_argument("--out", type=Path, required=True, help="folder of the runs")
    run.add_argument("--results", type=Path, required=True, help="folder of the results, one file per trial")
    run.add_argument("--seconds", type=float, default=math.inf, help="start no trial that would end later than this")
    run.add_argument("--trial-seconds", type=float, default=240, help="expected seconds of a trial before the first")
    run.add_argument("--only", nargs="+", metavar="NAME", help="groups, rows or trials")
    run.add_argument("--jobs", type=int, default=1, help="trials side by side; their seconds are not comparable")
    run.add_argument("--samples", type=int, default=4, help="replicates of the final bound")
    run.add_argument("--commit", help="recorded in the results (default: of this checkout)")
    run.add_argument("--extra", nargs="+", default=[], metavar="OVERRIDE", help="overrides of all trials")
    run.set_defaults(do=run_trials)
    for name, function in (("table", print_table), ("plot", plot)):
        command = commands.add_parser(name, help=f"{function.__doc__}".rstrip("."))
        command.add_argument("--results", type=Path, required=True)
        command.set_defaults(do=function)
    command.add_argument("--out", type=Path, required=True, help="folder of the figures")
    arguments = parser.parse_args()
    try:
        arguments.do(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


def print_rows(arguments: argparse.Namespace) -> None:
    for name, group in GROUPS.items():
        print(f"{name}: {group.question}")
        for trial in trials_of(name):
            own = " ".join((trial.row.preset, *trial.row.overrides))
            print(f"  {trial.key:32} {parameters_of(trial):>12,}  {own}")


def parameters_of(trial: Trial) -> int:
    config = replace(resolve(trial.overrides()), vocabulary=Vocabulary(NUM_SYMBOLS, mask_id=0))
    return num_parameters(on_meta(method_of(config).build))


def chosen_trials(only: list[str] | None) -> list[Trial]:
    """The trials that are named, by group, row or key; all but those of `smoke` if none is."""
    trials = [trial for group in GROUPS for trial in trials_of(group)]
    if only is None:
        return [trial for trial in trials if trial.group != "smoke"]
    unknown = set(only) - {name for trial in trials for name in (trial.group, trial.row.name, trial.key)}
    if unknown:
        raise UserError(f"--only {' '.join(sorted(unknown))}: no such group, row or trial; `rows` lists them")
    return [trial for trial in trials if {trial.group, trial.row.name, trial.key} & set(only)]


class Budget:
    """Decides whether a trial may still start, by the longest one so far, of earlier calls too."""

    def __init__(self, seconds: float, first_trial: float, past_seconds: list[float]):
        self.start, self.seconds = time.monotonic(), seconds
        self.first_trial, self.past_seconds = first_trial, past_seconds

    @property
    def trial_seconds(self) -> float:
        return MARGIN * max(self.past_seconds, default=self.first_trial)

    def allows_a_trial(self) -> bool:
        return time.monotonic() - self.start + self.trial_seconds <= self.seconds


def run_trials(arguments: argparse.Namespace) -> None:
    """Train and measure, `--jobs` trials at a time; one measurement at a time."""
    results, lock = read_results(arguments.results), threading.Lock()
    missing = {"train", "valid"} - set(open_prepared(arguments.data).splits)
    if missing:
        raise UserError(f"--data {arguments.data} has no split {' and '.join(sorted(missing))}; try data.held_out=0.01")
    todo = chosen_trials(arguments.only)
    for trial in [trial for trial in todo if trial.key in results]:
        if results[trial.key]["overrides"] != trial.overrides(arguments.extra):
            raise UserError(f"--results {arguments.results} has {trial.key} with other overrides; give another folder")
        todo.remove(trial)
    print(f"{len(results)} results in {arguments.results}, {len(todo)} trials to do", flush=True)
    budget = Budget(arguments.seconds, arguments.trial_seconds, [result["seconds"] for result in results.values()])
    commit, failed = arguments.commit or current_commit(), list[str]()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                if not budget.allows_a_trial():
                    print(f"no time for {todo[0].key}, about {budget.trial_seconds:.0f} s", flush=True)
                    return
                trial = todo.pop(0)
            started = time.monotonic()
            try:
                train_trial(trial, arguments)
                with lock:
                    result = measure(trial, arguments) | {"commit": commit, "jobs": arguments.jobs}
            except UserError as error:
                failed.append(trial.key)
                print(f"{trial.key} failed: {error}", flush=True)
                continue
            with lock:
                result["seconds"] = round(time.monotonic() - started, 1)
                budget.past_seconds.append(result["seconds"])
                write_file(arguments.results / f"{trial.key}.json", json.dumps(result) + "\n")
                remove_large_files(arguments.out / trial.key)
                print(
                    f"{trial.key}: {result['nats']:.4f} ± {result['stderr']:.4f} nats, {result['parameters']:,} "
                    f"parameters, {result['tokens_per_second']:,} tokens/s, {result['seconds']:.0f} s",
                    flush=True,
                )

    arguments.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for worker in [pool.submit(work) for _ in range(arguments.jobs)]:
            worker.result()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def train_trial(trial: Trial, arguments: argparse.Namespace) -> None:
    """Run `adlm train`; UserError with the end of its standard error if it fails."""
    words = [*trial.overrides(arguments.extra), f"data.prepared={arguments.data}"]
    command = [sys.executable, "-m", "adlm", "train", *words, "--out", str(arguments.out / trial.key), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise UserError(f"exit code {run.returncode}\n{run.stderr[-3000:]}")


def measure(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """The bound on all held-out rows, with the same random numbers for every trial, and what was trained."""
    folder, device = arguments.out / trial.key, local_device("auto")
    lm = load(folder, device)
    assert lm.tokenizer is not None
    settings = PerplexitySettings(samples=arguments.samples)
    with text_sets([str(arguments.data)], lm.tokenizer, lm.config.length, split="valid") as texts:
        nats = measure_nats(lm.method, lm.network, texts[0].rows, settings)
        held_out = {"sha256": texts[0].digest, "unit": texts[0].unit, "length": lm.config.length}
    estimate, logged = summarize(nats), read_metrics(folder / "metrics.jsonl")
    last, settled = logged[-1], logged[1:] or logged  # the first line includes compilation
    seconds_per_step = float(np.median([line["seconds_per_step"] for line in settled]))
    shares = [line["anchor_share"] for line in logged if line.get("anchor_share") is not None]
    curve = [line for line in logged if line.get("valid_nats") is not None]
    overrides = trial.overrides(arguments.extra)
    return {
        "row": trial.row.name,
        "seed": trial.seed,
        "group": trial.group,
        "overrides": overrides,
        "command": f"adlm train {' '.join(overrides)} data.prepared=PREPARED --out RUN",
        "device": device_name(device),
        "torch": torch.__version__,
        "parameters": num_parameters(lm.network),
        "decay": lm.config.train.decay,
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_second": round(last["tokens"] / last["step"] / seconds_per_step),
        "train_seconds": round(last["step"] * seconds_per_step, 3),
        "memory_gib": round(last["memory_gib"], 2),
        "skipped": last["skipped"],
        "anchor_share": float(np.mean(shares)) if shares else None,
        "curve": [
            [line["step"], round(line["step"] * seconds_per_step, 3), *_rounded(line, "valid_nats", "valid_stderr")]
            for line in curve
        ],
        "train_curve": [[line["step"], *_rounded(line, "nats", "anchor")] for line in logged],
        "held_out": held_out,
        "estimator": settings.estimator_of(lm.method),
        "nats": estimate.nats,
        "stderr": stderr_of(estimate),
        "perplexity": estimate.perplexity,
        **nats_as_json(nats),
    }


def _rounded(line: dict[str, Any], *names: str) -> list[float | None]:
    return [None if line.get(name) is None else round(line[name], 5) for name in names]


def remove_large_files(run: Path) -> None:
    """Checkpoint and best model of a measured run: 55M parameters are 0.9 GB with EMA and moments, and 0.2 GB."""
    for name in ("checkpoints", "best"):
        shutil.rmtree(run / name, ignore_errors=True)


def current_commit() -> str:
    """The commit of this checkout, with a + if files are changed; empty where there is no git."""
    try:
        git = [
            "git",
            "-C",
            os.path.dirname(os.path.abspath(__file__)),
            "describe",
            "--always",
            "--dirty=+",
            "--exclude=*",
        ]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def print_table(arguments: argparse.Namespace) -> None:
    """print the results as Markdown"""
    print("\n".join(markdown(read_results(arguments.results))))


def plot(arguments: argparse.Namespace) -> None:
    """draw the results, one SVG per group"""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in plot_groups(read_results(arguments.results), arguments.out):
        print(file)


if __name__ == "__main__":
    main()
