"""What a run writes down: metrics.jsonl always, and wherever else it is asked to. Knows no tensors, measures nothing.

A line of metrics.jsonl is one logged step. A run that goes on from a snapshot first takes back the lines of later
steps, so that the file is what an unbroken run would have written, clocks and rates aside.
"""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adlm.config.load import to_mapping
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, write_file, writing

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
