"""Trains and measures a trial of the arena, and times a training step of its rows."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arena.tables import ARENA, Result, nats_as_json, stderr_of, trials_with_results, waited_for_host
from sweep import MARGIN, Budget, Results, Trial, adlm, current_commit, key_of

from adlm import load
from adlm.config.load import resolve
from adlm.data.prepare.prepared import open_prepared
from adlm.distributed import device_name, local_device
from adlm.errors import UserError
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import summarize
from adlm.likelihood.text_sets import text_sets
from adlm.models.transformer import num_parameters
from adlm.training.metrics import read_metrics

TIMING_SECONDS = 60.0
"""Expected seconds of the first timing: most of it is compilation."""
SAME_WORK = ("train.seed=", "train.learning_rate=", "train.beta2=", "train.valid_every=", "train.warm_up_steps=")
"""Options that do not change the work of a training step."""
BY_TEXT = ("anchor.rule=rare", "anchor.rule=frequent", "anchor.rule=syntax")
"""Rules that need statistics or labels of the text; timed as random anchors."""
MEASURING = threading.Lock()
"""One measurement at a time."""


def check(trials: list[Trial], results: Results, arguments: argparse.Namespace) -> None:
    if arguments.data is None:
        raise UserError("--data is missing; give the prepared text of the trials")
    check_text(arguments.data, {trial.group.name for trial in trials}, results.of("trial"))


def check_text(data: Path, groups: set[str], results: Mapping[str, Result]) -> None:
    """UserError if the groups need another tokenizer, or their results so far are of another text."""
    prepared = open_prepared(data)
    missing = {"train", "valid"} - set(prepared.splits)
    if missing:
        raise UserError(f"--data {data} has no split {' and '.join(sorted(missing))}; try data.held_out=0.01")
    with text_sets([str(data)], prepared.tokenizer, prepared.manifest["length"], split="valid") as texts:
        digest, num_symbols = texts[0].digest, prepared.tokenizer.vocabulary.size
    for name in sorted(groups):
        group = ARENA.groups[name]
        if num_symbols != ARENA.symbols[group.tokenizer]:
            raise UserError(
                f"--data {data} has {num_symbols} symbols, and the group {name} needs the "
                f"{ARENA.symbols[group.tokenizer]} of tokenizer={group.tokenizer}; name the groups of this text with "
                "--only"
            )
        for row, seed, result in trials_with_results(group, results):
            if result["held_out"]["sha256"] != digest:
                raise UserError(
                    f"--data {data} is another text than that of the result {key_of(row.name, seed)}, with which the "
                    f"group {name} is compared; give that text, or another --results"
                )


def train(trial: Trial, arguments: argparse.Namespace) -> None:
    words = [*trial.overrides(arguments.extra), f"data.prepared={arguments.data}"]
    adlm("train", *words, "--out", str(arguments.out / trial.key), "--json")


def measure(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """The bound on all held-out rows, with the same random numbers for every trial, and what was trained."""
    folder, device = arguments.out / trial.key, local_device("auto")
    settings = PerplexitySettings(samples=arguments.samples)
    with MEASURING:
        lm = load(folder, device)
        assert lm.tokenizer is not None
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
        "group": trial.group.name,
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


def summary(result: Result) -> str:
    return (
        f"{result['nats']:.4f} ± {result['stderr']:.4f} nats, {result['parameters']:,} parameters, "
        f"{result['tokens_per_second']:,} tokens/s"
    )


def time_rows(arguments: argparse.Namespace) -> None:
    """Time a training step of every row, one after the other; rows with the same work share a timing."""
    results = Results(arguments.results)
    timings = results.of("timing")
    measured = {tuple(same_work(timing["work"])): timing for timing in timings.values()}
    budget, longest, failed = Budget(arguments.seconds), 0.0, list[str]()
    commit = arguments.commit or current_commit()
    for trial in {trial.row.name: trial for trial in ARENA.chosen(arguments.only)}.values():
        name, work = trial.row.name, work_of(trial, arguments.extra)
        if name in timings:
            if same_work(timings[name]["work"]) != work:
                raise UserError(f"--results {arguments.results} has a timing of {name} with other overrides")
            continue
        if tuple(work) not in measured:
            if not budget.allows(longest or TIMING_SECONDS):
                print(f"no time for {name}, about {MARGIN * (longest or TIMING_SECONDS):.0f} s", flush=True)
                break
            started = time.monotonic()
            try:
                measured[tuple(work)] = time_row(work) | {"measured_as": name, "commit": commit}
            except UserError as error:
                failed.append(name)
                print(f"{name} failed: {error}", flush=True)
                continue
            longest = max(longest, time.monotonic() - started)
        timing = measured[tuple(work)] | {"row": name}
        results.add("timing", name, timing)
        print(f"{name}: {1e3 * timing['seconds_per_step']:.2f} ms a step, {timing['tokens_per_second']:,} tokens/s")
        if waited_for_host(timing):
            busy = 1e3 * timing["busy_seconds_per_step"]
            print(f"  doubtful: the GPU computed for {busy:.2f} ms of it and waited for the host; time it again")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def work_of(trial: Trial, extra: list[str]) -> list[str]:
    """The overrides that determine the work of a training step."""
    words = ["anchor.rule=random" if word in BY_TEXT else word for word in trial.overrides(extra)]
    return same_work([*words, f"tokenizer={trial.group.tokenizer}"])


def same_work(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith(SAME_WORK)]


def time_row(work: list[str]) -> dict[str, Any]:
    """A step of the row: the mean over its training, if the anchor loss ends before it."""
    timing, until = time_step(work), resolve(work).anchor.until
    if until == 1:
        return timing
    after, with_loss = time_step([*work, "anchor.gamma=0"]), timing["seconds_per_step"]
    for name in ("seconds_per_step", "busy_seconds_per_step"):
        timing[name] = until * timing[name] + (1 - until) * after[name]
    tokens = round(timing["tokens_per_second"] * with_loss / timing["seconds_per_step"])
    phases = {"with_anchor_loss": with_loss, "without": after["seconds_per_step"]}
    return timing | {"tokens_per_second": tokens} | phases


def time_step(work: list[str]) -> dict[str, Any]:
    """`adlm bench train`: the median of 20 steps on random tokens, without validation and reading of data."""
    batch = resolve(work).train.batch_size
    speed = json.loads(adlm("bench", "train", *work, "--batch", str(batch), "--profile", "--json"))
    kernels = [milliseconds for kind, milliseconds in speed["profile"] if kind != "idle"]
    return {
        "work": work,
        "seconds_per_step": speed["milliseconds"] / 1e3,
        "busy_seconds_per_step": sum(kernels) / 1e3,
        "tokens_per_second": round(speed["tokens_per_second"]),
        "memory_gib": None if speed["peak_gib"] is None else round(speed["peak_gib"], 2),
        "compiled": speed["compiled"],
        "device": speed["device"],
        "torch": torch.__version__,
    }
