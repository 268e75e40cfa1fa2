"""What a run writes down: metrics.jsonl always, and wherever else it is asked to. Knows no tensors, measures nothing.

A line of metrics.jsonl is one logged step. A run that goes on from a snapshot first takes back the lines of later
steps, so that the file is what an unbroken run would have written, clocks and rates aside.
"""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adlm.config.load import to_mapping
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import write_file

Line = Mapping[str, float | int | None]

# What depends on the machine and the hour, not on the run.
CLOCKS = ("seconds_per_step", "tokens_per_second", "mfu", "memory_gib")


class Sink(Protocol):
    """Somewhere lines go."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl. What was written up to a snapshot is on the disk before the snapshot is."""

    def __init__(self, path: Path, step: int):
        self.path = path
        _take_back(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Line) -> None:
        try:
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}; make room, then run the same command again to go on "
                "from the last snapshot"
            ) from None

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # what a full disk refused was told when it was written
            self._file.close()


def _take_back(path: Path, step: int) -> None:
    """Keep the lines up to a step, and none that a crash cut off."""
    lines = read_metrics(path)
    kept = [line for line in lines if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_file(path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; it ends where a line is not whole."""
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return lines
    for row in text.splitlines():
        try:
            line = json.loads(row)
            line["step"]
        except (ValueError, KeyError, TypeError):
            break
        lines.append(line)
    return lines


def _plain(line: Line) -> dict[str, float | int | None]:
    """JSON has no infinity."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}


@dataclass(frozen=True)
class Logbook:
    """One line to everywhere."""

    metrics: Metrics
    others: Sequence[Sink]

    def write(self, line: Line) -> None:
        for sink in (self.metrics, *self.others):
            sink.write(line)

    def close(self) -> None:
        for sink in (*self.others, self.metrics):
            sink.close()


def open_logbook(place: Path, config: Config, step: int, screen: Sink) -> Logbook:
    """The logbook of a run that stands at `step`."""
    others: list[Sink] = [screen]
    if config.train.tensorboard:
        others.append(TensorBoard(place / "tensorboard", step))
    if config.train.wandb != "off":
        others.append(Wandb(place, config))
    return Logbook(Metrics(place / "metrics.jsonl", step), others)


def _needed(package: str, knob: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{knob} needs the package {package}, which is not installed; try pip install {package}")


class TensorBoard:
    """Events in the run's folder; those of steps that are done again are purged."""

    def __init__(self, folder: Path, step: int):
        _needed("tensorboard", "train.tensorboard true")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: Line) -> None:
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

    def write(self, line: Line) -> None:
        self._run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def close(self) -> None:
        self._run.finish()
