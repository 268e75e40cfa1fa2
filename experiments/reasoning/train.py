"""Trains and measures a trial of the reasoning sweep: `adlm reason train`, then `adlm reason eval` on the test file."""

import argparse
import json
from typing import Any

from sweep import Results, Trial, adlm

from adlm.errors import UserError

BASE = "reason.base=BASE"


def check(trials: list[Trial], results: Results, arguments: argparse.Namespace) -> None:
    for trial in trials:
        first = trial.needs or trial
        has_model = trial.needs is not None and (arguments.out / trial.needs.key / "model").exists()
        if arguments.base is None and BASE in first.overrides() and not has_model:
            raise UserError(f"--base is missing: {trial.key} starts from a pretrained model; give its folder")


def train(trial: Trial, arguments: argparse.Namespace) -> None:
    words = [f"reason.base={arguments.base}" if word == BASE else word for word in trial.overrides(arguments.extra)]
    if trial.needs:
        words.append(f"reason.base={arguments.out / trial.needs.key / 'model'}")
    adlm("reason", "train", *words, "--out", str(arguments.out / trial.key))


def measure(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `adlm reason eval` finds on the test file, which problems are solved, and the curve of training."""
    run, solutions = arguments.out / trial.key, arguments.out / f"{trial.key}.jsonl"
    data = trial.row.preset.partition("/")[0]
    found = json.loads(adlm("reason", "eval", str(run), "--data", data, "--json", "--out", str(solutions), "--force"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in solutions.read_text().splitlines()]
    curve = [[line["step"], line["epoch"], line.get("nats"), line.get("anchors")] for line in lines]
    overrides = trial.overrides(arguments.extra)
    start = f" reason.base=RUNS/{trial.needs.key}/model" if trial.needs else ""
    return {
        "group": trial.group.name,
        "row": trial.row.name,
        **found,
        "needs": trial.row.needs,
        "overrides": overrides,
        "command": f"adlm reason train {' '.join(overrides)}{start} --out RUN",
        "steps": lines[-1]["step"],
        "validation": lines[-1].get("valid_accuracy"),
        "solved": "".join("1" if answer["right"] else "0" for answer in answers),
        "curve": curve[:: max(1, len(curve) // 60)],
    }


def summary(result: dict[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f}) of {result['num']} problems"
