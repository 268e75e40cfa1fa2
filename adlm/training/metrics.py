"""The metrics of a run: counters, the line of a logged step, and where lines are written (metrics.jsonl, TensorBoard,
W&B).

A line of metrics.jsonl is one logged step. A resumed run first removes the lines of later steps, so that the file is
what an uninterrupted run would have written, except for timings. The report of a step is read one step late, when its
numbers have arrived, so that the host never waits for the GPU.
"""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from adlm.config.load import to_mapping
from adlm.config.schema import Config
from adlm.data.rows.loader import Position
from adlm.diffusion.objectives import anchor_gamma
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, write_file, writing
from adlm.training.optimizer import learning_rate
from adlm.training.step import StepReport
from adlm.training.validation import ValidationResult


@dataclass(frozen=True)
class Counters:
    """After `step` steps. All of it is a function of the steps done, so a resumed run counts on as if never broken."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """With `epoch`, where the next batch begins: see `data.loader.Position`."""
    tokens: int = 0
    """Trained on, over all processes."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_nats: float | None = None
    """The lowest validation bound so far."""
    best_step: int | None = None
    window: Mapping[str, float] = field(default_factory=dict)
    """Sums since the last line of the logbook: of each part of the loss over tokens, of the norm over steps."""

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.row)


def parse_counters(raw: Mapping[str, Any]) -> Counters:
    """Counters as JSON gives them back; TypeError where they are none."""
    counters = Counters(**raw)
    whole = (counters.step, counters.epoch, counters.row, counters.tokens, counters.skipped, counters.skipped_in_a_row)
    if not all(type(value) is int and value >= 0 for value in whole) or not isinstance(counters.window, dict):
        raise TypeError("its counters are not numbers")
    return counters


MetricsLine = Mapping[str, float | int | None]

LIMIT = 2**36
"""Bytes of the largest metrics.jsonl that is read."""

# What depends on the machine and the hour, not on the run.
CLOCKS = ("seconds_per_step", "tokens_per_second", "mfu", "memory_gib")


class Sink(Protocol):
    """Somewhere lines go."""

    def write(self, line: MetricsLine) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl. What was written up to a snapshot is on the disk before the snapshot is."""

    def __init__(self, path: Path, step: int, say: Callable[[str], None]):
        self.path = path
        _take_back(path, step, say)
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: MetricsLine) -> None:
        with writing(self.path):
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # what a full disk refused was told when it was written
            self._file.close()


def _take_back(path: Path, step: int, say: Callable[[str], None]) -> None:
    """Keep the lines up to a step. A file with lines that cannot be read is kept beside it, before they are dropped."""
    lines, num_damaged = scan_metrics(path)
    if num_damaged:
        content, place, number = read_bytes(path, LIMIT), path.with_name(f"{path.name}.damaged"), 1
        while place.exists() and read_bytes(place, LIMIT) != content:  # another one, or a start that was killed here
            number += 1
            place = path.with_name(f"{path.name}.damaged-{number}")
        write_file(place, content)
        say(f"{path} has {num_damaged} damaged line(s); it is kept as {place}, and its good lines are used")
    text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
    if not path.exists() or read_bytes(path, LIMIT) != text.encode():
        write_file(path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The good lines of a metrics.jsonl; none where there is no such file."""
    return scan_metrics(path)[0]


def scan_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The good lines of a metrics.jsonl, and how many are damaged; an unfinished last line is not counted."""
    if not path.exists():
        return [], 0
    *rows, rest = read_bytes(path, LIMIT).split(b"\n")
    found = [_line_of(row) for row in rows]
    last = _line_of(rest)
    lines = [line for line in found if line is not None]
    return [*lines, *([last] if last is not None else [])], len(found) - len(lines)


def _line_of(row: bytes) -> dict[str, Any] | None:
    """A line: numbers by name, one of them the step; None where it is none."""
    try:
        line = parse_json(row)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
        return None
    numbers = [value for value in line.values() if value is not None]
    return line if all(type(value) in (int, float) and abs(value) < math.inf for value in numbers) else None


def _plain(line: MetricsLine) -> dict[str, float | int | None]:
    """JSON has no infinity."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}


@dataclass(frozen=True)
class MetricsLogger:
    """One line to everywhere."""

    metrics: Metrics
    others: Sequence[Sink]

    def write(self, line: MetricsLine) -> None:
        for sink in (self.metrics, *self.others):
            sink.write(line)

    def close(self) -> None:
        for sink in (*self.others, self.metrics):
            sink.close()


class Speaker(Sink, Protocol):
    """A sink that can also say a sentence."""

    def say(self, sentence: str) -> None: ...


def open_metrics(place: Path, config: Config, step: int, screen: Speaker) -> MetricsLogger:
    """The logbook of a run that stands at `step`."""
    others: list[Sink] = [screen]
    if config.train.tensorboard:
        others.append(TensorBoard(place / "tensorboard", step))
    if config.train.wandb != "off":
        others.append(Wandb(place, config))
    return MetricsLogger(Metrics(place / "metrics.jsonl", step, screen.say), others)


def _needed(package: str, knob: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{knob} needs the package {package}, which is not installed; try pip install {package}")


class TensorBoard:
    """Events in the run's folder; those of steps that are done again are purged."""

    def __init__(self, folder: Path, step: int):
        _needed("tensorboard", "train.tensorboard true")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: MetricsLine) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; offline writes into the run's folder only. A resumed run goes on under its old id."""

    def __init__(self, place: Path, config: Config):
        _needed("wandb", f"train.wandb {config.train.wandb}")
        wandb: Any = importlib.import_module("wandb")
        marker = place / "wandb-id"
        if not marker.is_file():
            write_file(marker, secrets.token_hex(4))
        self._run = wandb.init(
            project="adlm",
            name=place.name,
            id=marker.read_text(encoding="utf-8"),
            resume="allow",
            mode=config.train.wandb,
            dir=str(place),
            config=to_mapping(config),
        )

    def write(self, line: MetricsLine) -> None:
        self._run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def close(self) -> None:
        self._run.finish()


STEPS, TOKENS, NORM = "steps", "tokens", "gradient_norm"  # names in a window that are no parts of the loss


@dataclass(frozen=True)
class PendingReport:
    """A step, its report not read yet."""

    report: StepReport
    tokens: int
    """Of all processes."""


def add_report(counters: Counters, taken: PendingReport, config: Config, last: str) -> Counters:
    """The counters with what the step reported; too many steps that were not finite end the run."""
    report = taken.report
    names = ("loss", "nats", *report.parts)
    values = [report.total, report.nats, *report.parts.values(), report.norm, report.finite]
    *sums, norm, finite = torch.stack([value.detach().double() for value in values]).tolist()
    if not finite:
        counters = replace(counters, skipped=counters.skipped + 1, skipped_in_a_row=counters.skipped_in_a_row + 1)
        if counters.skipped_in_a_row > config.train.skip_limit:
            raise UserError(
                f"the loss or its gradient was not finite at {counters.skipped_in_a_row} steps in a row, the last of "
                f"them step {counters.step} (loss {sums[0]:.4g}, gradient norm {norm:.4g}), and train.skip_limit is "
                f"{config.train.skip_limit}; none of them moved the weights. {last[0].upper()}{last[1:]}. Try a lower "
                "train.learning_rate or a longer train.warm_up_steps in a new run"
            )
        return counters
    window = dict(counters.window)
    more = {name: value * taken.tokens for name, value in zip(names, sums, strict=True)}
    for name, value in {**more, NORM: norm, TOKENS: taken.tokens, STEPS: 1}.items():
        window[name] = window.get(name, 0) + value
    return replace(counters, skipped_in_a_row=0, window=window)


def metrics_line(
    counters: Counters, config: Config, measured: ValidationResult | None, clocks: Mapping[str, float | None]
) -> MetricsLine:
    """What a logged step says: means since the last line, a token or a step, and what was measured."""
    window, train = dict(counters.window), config.train
    line: dict[str, float | int | None] = {"step": counters.step}
    steps, tokens = window.pop(STEPS, 0), window.pop(TOKENS, 0)
    if steps:
        norm = window.pop(NORM) / steps
        line |= {name: value / tokens for name, value in window.items()}
        line["gradient_norm"] = norm
    if "anchor" in window:
        done = (counters.step - 1) / train.steps
        line["gamma"] = anchor_gamma(config.anchor.gamma, done, config.anchor.warm_up)
    line["learning_rate"] = learning_rate(train, counters.step - 1)
    line |= {"tokens": counters.tokens, "epoch": counters.epoch, "skipped": counters.skipped}
    if measured is not None:
        line |= {
            "valid_nats": measured.nats,
            "valid_stderr": measured.stderr,
            "valid_perplexity": perplexity(measured.nats),
            "valid_tokens": measured.tokens,
        }
    return {**line, **clocks}


def perplexity(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
