"""`adlm train`: any method on any text, alone or under torchrun; runs are resumed, extended and plotted."""

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.cli.console import Console, Progress, duration, silence
from adlm.config.load import is_run_preset, load_config, resolve
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import writing
from adlm.training.metrics import MetricsLine
from adlm.training.plots import plot_runs

if TYPE_CHECKING:  # torch takes seconds to import, and a run says at once what it will do
    from adlm.training.train import RunStart, TrainOutcome

EXAMPLE = """adlm train own data.path='texts/*.txt'
  adlm train --out runs/own train.steps=1600
  adlm train owt/adlm model=small data.prepared=prepared/owt --out runs/adlm
  torchrun --nproc-per-node 8 -m adlm train owt/adlm train.micro_batch=32 --out runs/adlm
  adlm train --plot runs/adlm runs/mdlm"""

# How the numbers of a line are told, in this order; what a line does not have is left out. The nats of training are no
# bound: they are of t from t_min on, of the weights as they move, and with dropout.
TOLD = {
    "loss": "loss {:.4f}",
    "nats": "train nats {:.4f}",
    "anchor": "anchor {:.4f}",
    "gamma": "gamma {:.2g}",
    "learning_rate": "lr {:.2g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.1%}",
    "memory_gib": "{:.1f} GiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a preset or .yaml file, section=preset, or knob=value; read from left to right.\n"
        "knobs alone change those of the run in --out: train.steps=2000 extends it; no words resume it as it is",
    )
    parser.add_argument(
        "--out", metavar="RUN", type=Path, help="the folder of the run: new, or one to resume (runs/PRESET)"
    )
    parser.add_argument(
        "--plot",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="draw the curves of a run, curves.png and curves.svg in it;\n"
        "of several runs on one pair of axes, comparison.png and comparison.svg in the first",
    )
    parser.add_argument("--json", action="store_true", help="for machines: the outcome as one line")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        console = Console(stderr=True)
        places = [str(place) for place in plot_runs(arguments.plot, lambda line: console.print(line, soft_wrap=True))]
        sys.stdout.write(f"{json.dumps(places)}\n" if arguments.json else "".join(f"{place}\n" for place in places))
        return 0
    out = _out(arguments.words, arguments.out)
    config = _config(arguments.words, out)
    screen, speaks = TrainReporter(config), "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"
    text = config.data.prepared or config.data.name or config.data.path or config.data.hub
    if speaks and text:
        screen.say(f"{config.method} on {text}, into {out}")
    from adlm.training.train import train

    try:
        outcome = train(config, out, screen)
    finally:
        screen.close()
    if speaks:
        text = json.dumps(_report(outcome)) if arguments.json else _told(outcome)
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except OSError:  # the reader is gone or the terminal is closed; the run is done all the same
            silence(sys.stdout)
    return 128 + outcome.signal if outcome.signal else 0


def _out(words: list[str], out: Path | None) -> Path:
    """The folder of the run: as given, or runs/PRESET with - for /: runs/quickstart/adlm is the quickstart's model."""
    preset = next(filter(is_run_preset, words), None)
    if out is None and preset is None:
        resolve(words)  # a misspelt preset is told first
        raise UserError("--out is not given, and no preset to name the run after; add --out runs/NAME")
    return out or Path("runs", str(preset).replace("/", "-"))


def _config(words: list[str], out: Path) -> Config:
    """What the words ask for; knobs alone are laid over the config of the run that is there."""
    with writing(out):
        there = load_config(out / "config.yaml") if (out / "config.yaml").is_file() else None
    if there is None and not words:
        raise UserError(f"nothing says what to train, and {out} holds no run to resume; give a preset or knobs")
    knobs_alone = all("=" in word for word in words)
    config = resolve(words, there if knobs_alone else None)
    data = config.data
    if knobs_alone and there is None and not (data.name or data.path or data.hub or data.prepared):
        raise UserError(
            f"{out} holds no run to extend, and nothing says what to train on; give a preset, data=NAME, "
            "data.path=FILE or data.prepared=FOLDER"
        )
    return config


def _report(outcome: "TrainOutcome") -> dict[str, Any]:
    counters, measured = outcome.counters, outcome.measured
    return {
        "folder": str(outcome.folder),
        "step": counters.step,
        "tokens": counters.tokens,
        "skipped": counters.skipped,
        "nats": None if measured is None or not math.isfinite(measured.nats) else measured.nats,
        "stderr": None if measured is None or not math.isfinite(measured.stderr) else measured.stderr,
        "best_nats": counters.best_nats,
        "best_step": counters.best_step,
        "stopped_by": signal.Signals(outcome.signal).name if outcome.signal else None,
    }


def _told(outcome: "TrainOutcome") -> str:
    counters, measured = outcome.counters, outcome.measured
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        if not counters.step:
            return f"stopped by {name} before the first step was done; rerun the same command to start"
        return f"stopped by {name} after step {counters.step:,}, which is saved; rerun the same command to resume"
    text = f"{counters.step:,} steps, {counters.tokens:,} tokens: {outcome.folder / 'model'}"
    if measured is not None:
        error = f" ± {measured.stderr:.4f}" if measured.rows > 1 else ""
        what = "exact loss" if outcome.exact else "upper bound on the loss"
        text += f"\n{what} of {measured.tokens:,} held-out tokens: {measured.nats:.4f}{error} nats a token"
    return text


class TrainReporter:
    """The console: what a run is about to do, a line for each line of the logbook, and how far it is."""

    def __init__(self, config: Config):
        self.config = config
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.began, self.started_at = 0.0, 0
        self.exact = False

    def say(self, sentence: str) -> None:
        if self.progress is not None:
            self.progress.print(sentence, style="yellow")
        else:
            self.console.print(sentence, style="yellow", soft_wrap=True)

    def start(self, start: "RunStart") -> None:
        self.exact, self.started_at = start.exact, start.step
        self.say(described(start, self.config))
        self.progress = Progress(self.console, "training", self.config.train.steps, start.step)
        self.began = time.monotonic()

    def step(self, step: int) -> None:
        assert self.progress is not None
        self.progress.update(step)
        if step == self.started_at + 1:
            took = duration(time.monotonic() - self.began)
            self.say(f"step {step:,} of {self.config.train.steps:,} took {took}: about {self.progress.left}")

    def write(self, line: MetricsLine) -> None:
        assert self.progress is not None
        self.progress.print(in_words(line, self.config.train.steps, self.exact, self.progress.left))

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None


def described(start: "RunStart", config: Config) -> str:
    """What a run is about to do, in one line."""
    threads = "" if start.threads is None else f", {start.threads} thread{'s' if start.threads > 1 else ''}"
    text, train = "a stream of text", config.train
    if start.num_rows is not None:
        passes = train.steps * train.batch_size / start.num_rows
        text = (
            f"{start.num_rows:,} rows of {config.length} tokens from {start.num_tokens:,} tokens of text, "
            f"read {passes:.2g} times in {train.steps:,} steps of {train.batch_size}"
        )
    held_out = f"{start.num_held_out:,} rows held out" if start.num_held_out else "nothing held out"
    return f"{start.device}{threads}; {start.num_parameters:,} parameters; {text}; {held_out}"


def in_words(line: MetricsLine, steps: int, exact: bool, left: str = "") -> str:
    """One line for a reader. What is measured on held-out rows is exact, or an upper bound: <=."""
    words = [f"{line['step']:>{len(str(steps))}}/{steps}"]
    words += [form.format(value) for name, form in TOLD.items() if (value := line.get(name)) is not None]
    nats, stderr = line.get("valid_nats"), line.get("valid_stderr")
    if nats is not None:
        error = "" if stderr is None else f" ± {stderr:.4f}"
        at_most = "" if exact else "<= "
        words.append(f"held out {at_most}{nats:.4f}{error} nats (ppl {at_most}{line['valid_perplexity']:.2f})")
    if line.get("skipped"):
        words.append(f"skipped {line['skipped']}")
    return "  ".join([*words, left] if left else words)
