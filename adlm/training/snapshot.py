"""What a run resumes from: weights, averages and moments in shards, counters in JSON. Knows nothing of losses or data.

RUN/snapshots/step-00001000/: files of torch.distributed.checkpoint and snapshot.json, which comes last and holds the
size and checksum of all others. A snapshot is written beside its place and moved there, so it is there whole or not at
all; every process writes its own shards, and any number of processes can read them. It is the run's own: `adlm.load`
never opens one.
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from adlm.errors import UserError
from adlm.files import write_file
from adlm.training.average import Average
from adlm.training.counters import Counters, counters_from
from adlm.training.described_tensors import TensorReader
from adlm.training.engine import Processes

CARD = "snapshot.json"
FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot, found."""

    folder: Path
    counters: Counters
    nats: float | None
    """The validation bound at its step, where it was measured there."""


def tensors_of(network: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """All tensors of a run by name, to be saved or to be filled; an optimiser that has not moved yet gets its state."""
    if not optimizer.state:
        _begin(optimizer)
    tensors = {}
    for name, weight in network.named_parameters():
        tensors[f"weights.{name}"] = weight.detach()
        for kind, value in optimizer.state[weight].items():
            tensors[f"optimizer.{name}.{kind}"] = value
    if average is not None:
        tensors |= {f"average.{name}": weight for name, weight in average.weights.items()}
    return tensors


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state by a step of rate 0 along a gradient of 0; its count is then 0 again."""
    rates = [group["lr"] for group in optimizer.param_groups]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for weight in weights:
        optimizer.state[weight]["step"].zero_()


def save_snapshot(
    folder: Path, tensors: dict[str, Tensor], counters: Counters, nats: float | None, processes: Processes
) -> None:
    """Write a snapshot of this step, whole or not at all. Every process must call."""
    place = folder / name_of(counters.step)
    partial = folder / f".{place.name}.partial"
    if processes.first:
        with _told(place):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with _told(place), _quietly():
        writer = FileSystemWriter(str(partial), sync_files=True)
        save(tensors, storage_writer=writer, no_dist=processes.mesh is None)
    if processes.first:
        with _told(place):
            files = {path.name: _described(path) for path in sorted(partial.iterdir())}
            card = {"format": FORMAT, "counters": asdict(counters), "nats": nats, "files": files}
            write_file(partial / CARD, json.dumps(card, indent=1, allow_nan=False))
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
            _sync(folder)
    processes.same(None)  # nobody goes on before it is there


def load_tensors(snapshot: Snapshot, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Fill the tensors with what the snapshot holds, however many processes wrote it. Every process must call."""
    with _quietly():
        try:
            load(tensors, storage_reader=TensorReader(str(snapshot.folder)), no_dist=processes.mesh is None)
        except (CheckpointException, pickle.UnpicklingError, RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{snapshot.folder} does not fit this run: {_cause(error)}; was it made by another version of adlm?"
            ) from None


def find_snapshot(folder: Path, say: Callable[[str], None]) -> Snapshot | None:
    """The newest whole snapshot; each damaged one after it is told and set aside. None where none was ever made."""
    for left_over in (*folder.glob(".step-*.partial"), *folder.glob(".step-*.doomed")):  # by a run that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    places = sorted((path for path in folder.glob("step-*") if path.name[5:].isdigit()), reverse=True)
    for place in places:
        try:
            found = _checked(place)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else error
            say(f"snapshot {place} is damaged ({problem}); going back to the one before it")
            continue
        for damaged in places[: places.index(place)]:
            aside = damaged.with_name(f"{damaged.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
        return found
    if places:
        raise UserError(
            f"{folder} has {len(places)} snapshot(s) and every one is damaged; put one back, or move {folder} away to "
            "begin again"
        )
    return None


def prune(folder: Path, keep: int) -> None:
    """Delete all snapshots but the last `keep` and the one with the lowest validation bound."""
    places = sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit())
    bounds = {place: nats for place in places if (nats := _nats(place)) is not None}
    kept = {*places[-keep:], *([min(bounds, key=lambda place: bounds[place])] if bounds else [])}
    for place in places:
        if place not in kept:
            doomed = place.with_name(f".{place.name}.doomed")
            place.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def last_good(folder: Path) -> str:
    """For sentences: what a run goes on from."""
    places = sorted(path.name for path in folder.glob("step-*") if path.name[5:].isdigit())
    return f"the last snapshot is {folder / places[-1]}" if places else "there is no snapshot yet"


def name_of(step: int) -> str:
    return f"step-{step:08}"


def _nats(place: Path) -> float | None:
    try:
        nats = json.loads((place / CARD).read_text(encoding="utf-8"))["nats"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(nats) if isinstance(nats, (int, float)) else None


def _checked(place: Path) -> Snapshot:
    """The snapshot, if every file is what was written; else an error that says which is not."""
    try:
        card = json.loads((place / CARD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{CARD} is missing") from None
    except ValueError:
        raise ValueError(f"{CARD} cannot be read") from None
    if card["format"] != FORMAT:
        raise ValueError(f"it is of format {card['format']}, and this version reads {FORMAT}")
    counters = counters_from(card["counters"])
    files: Mapping[str, dict[str, Any]] = card["files"]
    for name, entry in files.items():
        if not (place / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (place / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes and had {entry['bytes']:,}")
    with ThreadPoolExecutor() as threads:
        for name, now in zip(files, threads.map(lambda name: _described(place / name), files), strict=True):
            if now != files[name]:
                raise ValueError(f"{name} is not what was written: its checksum differs")
    return Snapshot(place, counters, card["nats"])


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _told(place: Path) -> Iterator[None]:
    """What the disk refuses, in a sentence."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        shutil.rmtree(place.with_name(f".{place.name}.partial"), ignore_errors=True)
        raise UserError(
            f"snapshot {place} cannot be written: {_cause(error)}; make room or make the folder writable, then run the "
            f"same command again: {last_good(place.parent)}"
        ) from None


def _cause(error: BaseException) -> str:
    """The first thing that went wrong, without torch's wrapping."""
    if isinstance(error, CheckpointException):
        failure = next(iter(error.failures.values()))
        return _cause(failure[0] if isinstance(failure, tuple) else failure)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


@contextmanager
def _quietly() -> Iterator[None]:
    """torch warns that one process alone is one process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sync(folder: Path) -> None:
    """The renaming itself is on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
