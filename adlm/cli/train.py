"""`adlm train`: train a model, single-process or under torchrun; resume, extend and plot runs."""

import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.cli.console import Console, Progress, duration
from adlm.cli.streams import silence
from adlm.config.load import is_run_preset, load_config, resolve
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import reporting_os_errors
from adlm.request import Request, option

if TYPE_CHECKING:  # importing torch takes seconds; the first message is printed before
    from adlm.training.metrics import MetricsLine
    from adlm.training.task import OpenTask
    from adlm.training.train import RunStart, TrainOutcome


# Formats of the fields of a metrics line, in this order; missing fields are skipped. Training nats are not a bound:
# they use t >= t_min, the raw weights instead of the EMA, and dropout.
METRIC_FORMATS = {
    "loss": "loss {:.4f}",
    "nats": "train nats {:.4f}",
    "anchor": "anchor {:.4f}",
    "anchors": "anchors {:.4f}",
    "gamma": "gamma {:.2g}",
    "learning_rate": "lr {:.2g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.1%}",
    "memory_gib": "{:.1f} GiB",
}


@dataclass(frozen=True)
class TrainRequest(Request):
    """The options of `adlm train`."""

    example = """adlm train own init=box data.path='texts/*.txt'
  adlm train own init=smollm2 data.path=book.txt
  adlm train adapt/smollm2 data.path=pairs.jsonl data.format=pairs train.infill=0 --out runs/chat
  adlm train --out runs/own train.steps=400
  adlm train owt/adlm model=small data.prepared=prepared/owt --out runs/adlm
  torchrun --nproc-per-node 8 -m adlm train owt/adlm train.micro_batch=32 --out runs/adlm
  adlm train --plot runs/adlm runs/mdlm"""

    overrides: tuple[str, ...] = option(
        "a preset or .yaml file, section=preset, or option=value, applied from left to right;\n"
        "init=box starts from the model in the box, init=smollm2 from a larger one, init=RUN from another run;\n"
        "without a preset they change the run in --out: train.steps=2000 extends it; with none, it is resumed",
        (),
        positional=True,
    )
    out: Path | None = option("run folder: a new one, or one to resume (default: runs/PRESET)", None, metavar="RUN")
    plot: tuple[Path, ...] = option(
        "plot the curves of a run to curves.png and curves.svg in its folder;\n"
        "of several runs to comparison.png and comparison.svg in the first folder",
        (),
        metavar="RUN",
    )
    json: bool = option("print the result as one line of JSON", False)


def run(request: TrainRequest) -> int:
    if request.plot:
        if request.out is not None or request.overrides:
            given = " ".join(["--out"] * (request.out is not None) + list(request.overrides))
            raise UserError(f"--plot writes into the first run's folder and takes no other option; leave out {given}")
        from adlm.apps.plots import plot_runs

        console = Console(stderr=True)
        files = [str(file) for file in plot_runs(request.plot, lambda line: console.print(line, soft_wrap=True))]
        sys.stdout.write(f"{json.dumps(files)}\n" if request.json else "".join(f"{file}\n" for file in files))
        return 0
    out, config = resolve_run(request.overrides, request.out)
    if config.reason is not None:
        raise UserError(f"reason.method {config.reason.method} is trained by `adlm reason train`")
    from adlm.training.text import open_text_task

    return train_and_report(config, out, open_text_task, request.json)


def train_and_report(config: Config, out: Path, open_task: "OpenTask", as_json: bool) -> int:
    """Train, print the result, and return the exit code."""
    reporter = TrainReporter(config)
    is_rank_zero = "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"
    source = config.data.prepared or config.data.name or config.data.path or config.data.hub
    if is_rank_zero and source:
        method = config.method if config.reason is None else config.reason.method
        reporter.info(f"training {method} on {source}, output in {out}")
    from adlm.training.train import train

    try:
        outcome = train(config, out, reporter, open_task)
    finally:
        reporter.close()
    if is_rank_zero:
        text = json.dumps(_report(outcome)) if as_json else _format_outcome(outcome, reporter.rows, config)
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except OSError:  # the pipe or terminal is closed; the run itself has succeeded
            silence(sys.stdout)
    return 128 + outcome.signal if outcome.signal else int(_has_diverged(outcome))


def resolve_run(overrides: Sequence[str], out: Path | None) -> tuple[Path, Config]:
    """The folder of a run and its config; overrides without a preset apply to the existing run in `out`.

    The default is runs/PRESET with / replaced by -, since runs/quickstart/adlm is a model folder of the quickstart.
    """
    preset = next(filter(is_run_preset, overrides), None)
    if out is None and preset is None:
        resolve(overrides)  # report a misspelt preset first
        if not overrides:
            raise UserError("no preset is given; try `adlm train own init=box data.path=FILE`, or --out RUN to resume")
        raise UserError("--out is not given, and there is no preset to name the run after; add --out runs/NAME")
    out = out or Path("runs", str(preset).replace("/", "-"))
    with reporting_os_errors(out):
        existing = load_config(out / "config.yaml") if (out / "config.yaml").is_file() else None
    if existing is None and not overrides:
        raise UserError(
            f"no preset or option is given, and {out} holds no run to resume; give a preset or option=value"
        )
    has_no_preset = all("=" in override for override in overrides)
    config = resolve(overrides, existing if has_no_preset else None)
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    if given.get("tokenizer") and "data.prepared" in given and config.data.prepared:
        raise UserError(
            f"tokenizer {given['tokenizer']} is given, and data.prepared {config.data.prepared} has a tokenizer of its "
            "own; leave out tokenizer=",
            "tokenizer",
        )
    data = config.data
    if has_no_preset and existing is None and not (data.name or data.path or data.hub or data.prepared):
        raise UserError(
            f"{out} holds no run to extend, and no training text is given; give a preset, data=NAME, "
            "data.path=FILE or data.prepared=FOLDER"
        )
    return out, config


def _has_diverged(outcome: "TrainOutcome") -> bool:
    """Whether the weights are worse than any that were trained well: a guess costs about 11 nats per token."""
    return outcome.measured is not None and not outcome.measured.nats < 1000


def _report(outcome: "TrainOutcome") -> dict[str, Any]:
    counters, measured = outcome.counters, outcome.measured
    return {
        "folder": str(outcome.folder),
        "step": counters.step,
        "tokens": counters.tokens,
        "skipped": counters.skipped,
        "nats": None if measured is None or not math.isfinite(measured.nats) else measured.nats,
        "accuracy": None if measured is None else measured.accuracy,
        "stderr": None if measured is None or not math.isfinite(measured.stderr) else measured.stderr,
        "best_nats": counters.best_nats,
        "best_step": counters.best_step,
        "stopped_by": signal.Signals(outcome.signal).name if outcome.signal else None,
    }


def _format_outcome(outcome: "TrainOutcome", rows: str, config: Config) -> str:
    """`rows` says which held-out rows the bound is of."""
    counters, measured = outcome.counters, outcome.measured
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        if not counters.step:
            return f"stopped by {name} before the first step; rerun the same command to start"
        return (
            f"stopped by {name} after step {counters.step:,}; a checkpoint is saved; rerun the same command to resume"
        )
    text = f"{counters.step:,} steps, {counters.tokens:,} tokens: {outcome.folder / 'model'}"
    if measured is not None:
        error = f" ± {measured.stderr:.4f}" if measured.rows > 1 else ""
        quantity = "exact loss" if outcome.exact else "upper bound on the loss"
        tokens = f"{measured.tokens:,} held-out tokens ({rows})"
        text += f"\n{quantity} of {tokens}: {measured.nats:.4f}{error} nats per token"
        if measured.accuracy is not None:
            text += f"\nsolved {measured.accuracy:.1%} of {measured.rows} held-out problems"
    if _has_diverged(outcome):
        return (
            f"{text}\ntraining diverged, and the weights are of no use; train again with another --out and a lower "
            f"train.learning_rate (now {config.train.learning_rate:g})"
        )
    folder = shlex.quote(str(outcome.folder))
    if config.reason is not None:
        commands = [f"adlm reason eval {outcome.folder}"]
    else:
        is_chat = config.data.format == "pairs"  # served with /v1/chat/completions
        commands = [f"adlm serve {folder}" if is_chat else f'adlm sample {folder} --prompt "The" --watch']
        if measured is not None and not config.data.streaming:
            from adlm.data.prepare.prepared import weighted_folders

            texts = weighted_folders(config.data.prepared) if config.data.prepared else [outcome.folder / "data"]
            commands += [f"adlm perplexity {folder} --data {shlex.quote(str(text))}" for text in texts]  # all held out
        commands.append(f"adlm train --out {folder} train.steps={2 * config.train.steps}")
    return "\n".join([text, "next:", *(f"  {command}" for command in commands)])


class TrainReporter:
    """Prints the progress of a run on standard error: what it does, a line per metrics line, and the remaining time."""

    def __init__(self, config: Config):
        self.config = config
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.start_time, self.start_step = 0.0, 0
        self.exact = False
        self.rows = ""
        """Which of the held-out rows are used for validation."""

    def info(self, message: str) -> None:
        if self.progress is not None:
            self.progress.print(message, style="yellow")
        else:
            self.console.print(message, style="yellow", soft_wrap=True)

    def start(self, start: "RunStart") -> None:
        self.exact, self.start_step, self.rows = start.exact, start.step, describe_held_out(start)
        self.info(describe_start(start, self.config))
        if start.step == self.config.train.steps:
            self.info(f"all {start.step:,} steps are done; a larger train.steps trains the run longer")
        self.progress = Progress(self.console, "training", self.config.train.steps, start.step)
        self.start_time = time.monotonic()

    def step(self, step: int) -> None:
        assert self.progress is not None
        self.progress.update(step)
        if step == self.start_step + 1:
            took = duration(time.monotonic() - self.start_time)
            self.info(f"step {step:,} of {self.config.train.steps:,} took {took}: about {self.progress.left}")

    def write(self, line: "MetricsLine") -> None:
        assert self.progress is not None
        self.progress.print(format_metrics(line, self.config.train.steps, self.exact, self.progress.left))

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None


def describe_start(start: "RunStart", config: Config) -> str:
    """One line about a run that starts: device, parameters, text and held-out rows."""
    threads = "" if start.threads is None else f", {start.threads} thread{'s' if start.threads > 1 else ''}"
    text, train = "streamed text", config.train
    if start.size.num_rows is not None:
        passes = train.steps * train.batch_size / start.size.num_rows
        rows = f"rows of {config.length} tokens" if config.reason is None else "problems"
        text = (
            f"{start.size.num_rows:,} {rows} from {start.size.num_tokens:,} tokens of text, "
            f"{passes:.2g} epochs in {train.steps:,} steps of {train.batch_size} rows"
        )
    held_out = f"validation on {describe_held_out(start)}" if start.size.num_held_out else "no rows held out"
    parameters = f"{start.num_parameters:,} parameters"
    if start.num_trained < start.num_parameters:
        parameters += f", {start.num_trained:,} of them trained"
    return f"{start.device}{threads}; {parameters}; {text}; {held_out}"


def describe_held_out(start: "RunStart") -> str:
    """Which rows the held-out bounds of a run are of; `adlm perplexity` measures all of them."""
    if start.size.num_held_out == start.size.num_held_out_in_all:
        return f"all {start.size.num_held_out:,} held-out rows"
    return f"{start.size.num_held_out:,} of {start.size.num_held_out_in_all:,} held-out rows"


def format_metrics(line: "MetricsLine", steps: int, exact: bool, left: str = "") -> str:
    """One printed line of metrics. Held-out nats are exact, or an upper bound marked with <=."""
    fields = [f"{line['step']:>{len(str(steps))}}/{steps}"]
    fields += [form.format(value) for name, form in METRIC_FORMATS.items() if (value := line.get(name)) is not None]
    nats, stderr = line.get("valid_nats"), line.get("valid_stderr")
    if nats is not None:
        error = "" if stderr is None else f" ± {stderr:.4f}"
        at_most = "" if exact else "<= "
        fields.append(f"held out {at_most}{nats:.4f}{error} nats (ppl {at_most}{line['valid_perplexity']:.2f})")
    if line.get("valid_accuracy") is not None:
        fields.append(f"{line['valid_accuracy']:.1%} solved")
    if line.get("skipped"):
        fields.append(f"skipped {line['skipped']}")
    return "  ".join([*fields, left] if left else fields)
