"""Training checkpoints: weights, EMA and optimizer moments as sharded tensors, counters and config as JSON.

RUN/snapshots/step-00001000/ holds files of torch.distributed.checkpoint and snapshot.json, which is written last and
has the run's config, the size and checksum of every other file, and a checksum of its own content. A checkpoint is
written under a temporary name and renamed, so it is complete or absent. Every rank writes its own shards; any number of
ranks can read them.

torch would unpickle the description of the tensors (`.metadata`) and any other object as it comes. `TensorReader`
allows only the records that describe tensors and reads no other object, so a tampered checkpoint cannot execute code.
"""

import hashlib
import json
import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from adlm.errors import UserError
from adlm.files import PART, move_folder, parse_json, read_bytes, remove_folder
from adlm.training.ema import EMA
from adlm.training.metrics import Counters, parse_counters
from adlm.training.sharding import Processes

ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        named = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in ALLOWED or isinstance(named, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a description of tensors")


class TensorReader(FileSystemReader):
    """torch's reader of a folder, for tensors alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description; raises UnpicklingError where it is none."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Description(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no description of tensors")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is no tensor")
        return metadata


MANIFEST = "snapshot.json"
FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A whole snapshot, found."""

    folder: Path
    counters: Counters
    config: Mapping[str, Any]
    """Of the run when it was saved, as nested dicts."""
    damaged: tuple[Path, ...] = ()
    """Later snapshots that are not whole."""


class _Writer(FileSystemWriter):
    """torch's writer of a folder, without the random id and the path: the same tensors are the same bytes."""

    def storage_meta(self) -> StorageMeta | None:
        return None


def tensors_of(network: nn.Module, optimizer: torch.optim.Optimizer, average: EMA | None) -> dict[str, Tensor]:
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


def save_checkpoint(
    folder: Path,
    tensors: dict[str, Tensor],
    counters: Counters,
    nats: float | None,
    config: Mapping[str, Any],
    processes: Processes,
) -> None:
    """Write a snapshot of this step, whole or not at all. Every process must call.

    `nats` is the validation bound, where it was measured at this step.
    """
    place = folder / checkpoint_name(counters.step)
    part = folder / f".{place.name}.new{PART}"  # the same for all processes
    with _told(place, part):
        if processes.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        with _quietly():
            save(tensors, storage_writer=_Writer(str(part), sync_files=True), no_dist=processes.mesh is None)
        if processes.first:
            files = {path.name: _described(path) for path in sorted(part.iterdir())}
            finite = nats if nats is not None and math.isfinite(nats) else None
            card = {"format": FORMAT, "counters": asdict(counters), "nats": finite, "config": config, "files": files}
            write_card(part / MANIFEST, card)
            _sync(part)
            move_folder(part, place)
            shutil.rmtree(part, ignore_errors=True)
            _sync(folder)
    processes.same(None)  # nobody goes on before it is there


def write_card(path: Path, card: Mapping[str, Any]) -> None:
    """snapshot.json, with the checksum of its content."""
    with path.open("w", encoding="utf-8") as file:
        json.dump({**card, "sha256": _sum_of(card)}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _sum_of(card: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def load_tensors(snapshot: Checkpoint, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Fill the tensors with what the snapshot holds, however many processes wrote it. Every process must call."""
    with _quietly():
        try:
            load(tensors, storage_reader=TensorReader(str(snapshot.folder)), no_dist=processes.mesh is None)
        except (CheckpointException, pickle.UnpicklingError, RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{snapshot.folder} does not fit this run: {_cause(error)}; was it made by another version of adlm?"
            ) from None


def find_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole snapshot, or None where none was ever made; damaged ones after it are reported. Changes nothing.

    `tidy` sets the damaged ones aside.
    """
    places = _places(folder)[::-1]
    for number, place in enumerate(places):
        try:
            found = _checked(place)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else error
            say(f"snapshot {place} is damaged ({problem}); going back to the one before it")
            continue
        return replace(found, damaged=tuple(places[:number]))
    if places:
        raise UserError(
            f"{folder} has {len(places)} snapshot(s) and every one is damaged; put one back, or move {folder} away to "
            "begin again"
        )
    return None


def tidy(found: Checkpoint, keep: int) -> None:
    """Rename damaged snapshots after the one that is resumed, and delete what an interrupted run had still to."""
    for damaged in found.damaged:
        aside = damaged.with_name(f"{damaged.name}.damaged")
        if aside.exists():
            remove_folder(aside)
        damaged.rename(aside)
    prune_checkpoints(found.folder.parent, keep)


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all snapshots but the last `keep` and the one with the lowest validation bound."""
    places = _places(folder)
    bounds = {place: nats for place in places if (nats := _nats(place)) is not None}
    kept = {*places[-keep:], *([min(bounds, key=lambda place: bounds[place])] if bounds else [])}
    for place in places:
        if place not in kept:
            remove_folder(place)


def _places(folder: Path) -> list[Path]:
    """The snapshots, by their names, in order."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdecimal())


def describe_last(folder: Path) -> str:
    """For sentences: what a run goes on from."""
    places = _places(folder)
    return f"the last snapshot is {places[-1]}" if places else "there is no snapshot yet"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08}"


def _nats(place: Path) -> float | None:
    try:
        nats = _card(place)["nats"]
    except (OSError, ValueError, KeyError):
        return None
    return float(nats) if isinstance(nats, (int, float)) else None


def _card(place: Path) -> dict[str, Any]:
    """The content of snapshot.json; ValueError where it is not what was written."""
    if not (place / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        card = parse_json(read_bytes(place / MANIFEST))
    except ValueError:
        raise ValueError(f"{MANIFEST} cannot be read") from None
    if not isinstance(card, dict) or card.pop("sha256", None) != _sum_of(card):
        raise ValueError(f"{MANIFEST} is not what was written: its checksum differs")
    return card


def _checked(place: Path) -> Checkpoint:
    """The snapshot, if every file is what was written; else an error that says which is not."""
    card = _card(place)
    if card["format"] != FORMAT:
        raise ValueError(f"it is of format {card['format']}, and this version reads {FORMAT}")
    counters = parse_counters(card["counters"])
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
    return Checkpoint(place, counters, dict(card["config"]))


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _told(place: Path, part: Path) -> Iterator[None]:
    """What the disk refuses, as a user error; what was written so far is deleted."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"snapshot {place} cannot be written: {_cause(error)}; make room or make the folder writable, then run the "
            f"same command again: {describe_last(place.parent)}"
        ) from None


def _cause(error: BaseException) -> str:
    """The first thing that went wrong, without torch's wrapping."""
    if isinstance(error, CheckpointException):
        failure = next(iter(error.failures.values()))
        return _cause(failure[0] if isinstance(failure, tuple) else failure)
    within: BaseException | None = error
    while within is not None:
        if isinstance(within, OSError) and within.strerror:
            return within.strerror
        within = within.__cause__ or within.__context__
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
