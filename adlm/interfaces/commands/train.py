"""`adlm train`: any method on any text, alone or under torchrun; on the folder of a run it goes on with it."""

import argparse
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from adlm.config.load import names_run, resolve
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.interfaces.console import Console
from adlm.training.curves import plot
from adlm.training.logbook import Line
from adlm.training.run_folder import RunFolder
from adlm.training.train import Outcome, train

EXAMPLE = """adlm train own data.path='texts/*.txt'
  adlm train --out runs/own train.steps=1600
  adlm train owt/adlm model=small data.prepared=prepared/owt --out runs/adlm
  torchrun --nproc-per-node 8 -m adlm.interfaces.cli train owt/adlm train.micro_batch=32 --out runs/adlm
  adlm train --plot runs/adlm"""

# How the numbers of a line are told, in this order; what a line does not have is left out.
TOLD = {
    "loss": "loss {:.4f}",
    "nats": "bound {:.4f}",
    "perplexity": "ppl {:.2f}",
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
    parser.add_argument("--plot", metavar="RUN", type=Path, help="draw the curves of a run: curves.png and curves.svg")
    parser.add_argument("--json", action="store_true", help="for machines: the outcome as one line")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        places = [str(place) for place in plot(arguments.plot)]
        sys.stdout.write(f"{json.dumps(places)}\n" if arguments.json else "".join(f"{place}\n" for place in places))
        return 0
    out = _out(arguments.words, arguments.out)
    config = _config(arguments.words, out)
    screen = Screen(config.train.steps)
    try:
        outcome = train(config, out, screen)
    finally:
        screen.close()
    if int(os.environ.get("RANK", 0)) == 0:
        report = _report(outcome)
        sys.stdout.write(f"{json.dumps(report)}\n" if arguments.json else f"{_told(outcome)}\n")
    return 128 + outcome.signal if outcome.signal else 0


def _out(words: list[str], out: Path | None) -> Path:
    """The folder of the run: as given, or runs/PRESET."""
    preset = next(filter(names_run, words), None)
    if out is None and preset is None:
        raise UserError("--out is not given, and no preset to name the run after; add --out runs/NAME")
    return out or Path("runs", str(preset))


def _config(words: list[str], out: Path) -> Config:
    """What the words ask for; knobs alone are laid over the config of the run that is there."""
    there = RunFolder(out).config
    if there is None and not words:
        raise UserError(f"nothing says what to train, and {out} holds no run to resume; give a preset or knobs")
    return resolve(words, None if any("=" not in word for word in words) else there)


def _report(outcome: Outcome) -> dict[str, Any]:
    counters, measured = outcome.counters, outcome.measured
    return {
        "folder": str(outcome.folder),
        "step": counters.step,
        "tokens": counters.tokens,
        "skipped": counters.skipped,
        "nats": None if measured is None else measured.nats,
        "stderr": None if measured is None or measured.rows < 2 else measured.stderr,
        "best_nats": counters.best_nats,
        "best_step": counters.best_step,
        "stopped_by": signal.Signals(outcome.signal).name if outcome.signal else None,
    }


def _told(outcome: Outcome) -> str:
    counters, measured = outcome.counters, outcome.measured
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        return f"stopped by {name} after step {counters.step:,}, which is saved: the same command goes on from there"
    text = f"{counters.step:,} steps, {counters.tokens:,} tokens: {outcome.folder / 'model'}"
    if measured is not None:
        error = f" ± {measured.stderr:.4f}" if measured.rows > 1 else ""
        text += f"\nbound on {measured.tokens:,} held-out tokens: {measured.nats:.4f}{error} nats a token"
    return text


class Screen:
    """The console: a line for each line of the logbook, and below them how far the run is."""

    def __init__(self, steps: int):
        self.steps = steps
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.task = TaskID(0)

    def say(self, sentence: str) -> None:
        self.console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def write(self, line: Line) -> None:
        step, pace = int(line["step"] or 0), line.get("seconds_per_step")
        left = "" if pace is None else f"{timedelta(seconds=round((self.steps - step) * pace))} left"
        self.console.print(in_words(line, self.steps, left), markup=False, highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            return
        if self.bar is None:
            columns = (TextColumn("training"), BarColumn(), TextColumn("{task.percentage:.1f}%  {task.fields[left]}"))
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("training", total=self.steps, left=left)
            self.bar.start()
        self.bar.update(self.task, completed=step, left=left)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def in_words(line: Line, steps: int, left: str = "") -> str:
    """One line for a reader."""
    words = [f"{line['step']:>{len(str(steps))}}/{steps}"]
    words += [form.format(value) for name, form in TOLD.items() if (value := line.get(name)) is not None]
    nats, stderr = line.get("valid_nats"), line.get("valid_stderr")
    if nats is not None:
        error = "" if stderr is None else f" ± {stderr:.4f}"
        words.append(f"held out {nats:.4f}{error} (ppl {line['valid_perplexity']:.2f})")
    if line.get("skipped"):
        words.append(f"skipped {line['skipped']}")
    return "  ".join([*words, left] if left else words)
