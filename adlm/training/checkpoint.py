"""Training checkpoints: weights, EMA and optimizer moments as sharded tensors, counters and config as JSON.

RUN/checkpoints/step-00001000/ holds files of torch.distributed.checkpoint and checkpoint.json, which is written last
and has the run's config, the size and checksum of every other file, and a checksum of its own content. A checkpoint is
written under a temporary name and renamed, so it is complete or absent. Every rank writes its own shards; any number of
ranks can read them.

torch's own reader unpickles the tensor metadata (`.metadata`) without restrictions. `TensorReader` unpickles only the
classes that describe tensors, so a tampered checkpoint cannot execute code.
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

ALLOWED_CLASSES = {
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


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        attribute = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in ALLOWED_CLASSES or isinstance(attribute, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in tensor metadata")


class TensorReader(FileSystemReader):
    """torch's FileSystemReader, restricted to tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensor metadata; UnpicklingError if the file holds anything else."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(".metadata does not hold tensor metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is not a tensor")
        return metadata


MANIFEST = "checkpoint.json"
FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint on disk."""

    folder: Path
    counters: Counters
    config: Mapping[str, Any]
    """Of the run when the checkpoint was saved, as nested dicts."""
    damaged: tuple[Path, ...] = ()
    """Later checkpoints, which are damaged."""


class _Writer(FileSystemWriter):
    """torch's FileSystemWriter without the random id and the path, so that equal tensors give equal bytes."""

    def storage_meta(self) -> StorageMeta | None:
        return None


def named_tensors(network: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> dict[str, Tensor]:
    """All tensors of a run by name, to save or to load into; creates the optimizer state if there is none yet."""
    if not optimizer.state:
        _create_state(optimizer)
    tensors = {}
    for name, weight in network.named_parameters():
        tensors[f"weights.{name}"] = weight.detach()
        for kind, value in optimizer.state[weight].items():
            tensors[f"optimizer.{name}.{kind}"] = value
    if ema is not None:
        tensors |= {f"average.{name}": weight for name, weight in ema.weights.items()}
    return tensors


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state by a step with learning rate 0 and zero gradients, then reset the step count to 0."""
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
    """Write a checkpoint of this step atomically. A collective call: every process must make it.

    `nats` is the validation bound, if it was computed at this step.
    """
    path = folder / checkpoint_name(counters.step)
    part = folder / f".{path.name}.new{PART}"  # the same on all processes
    with _write_errors_as_user_errors(path, part):
        if processes.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        with _without_warnings():
            save(tensors, storage_writer=_Writer(str(part), sync_files=True), no_dist=processes.mesh is None)
        if processes.is_main_process:
            manifest = {
                "format": FORMAT,
                "counters": asdict(counters),
                "nats": nats if nats is not None and math.isfinite(nats) else None,
                "config": config,
                "files": {file.name: _size_and_checksum(file) for file in sorted(part.iterdir())},
            }
            write_manifest(part / MANIFEST, manifest)
            _sync(part)
            move_folder(part, path)
            shutil.rmtree(part, ignore_errors=True)
            _sync(folder)
    processes.broadcast(None)  # a barrier: no process continues before the checkpoint exists


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """checkpoint.json, with the checksum of its content."""
    with path.open("w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": _checksum(manifest)}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Load the checkpoint into the tensors, however many processes wrote it. A collective call."""
    with _without_warnings():
        try:
            load(tensors, storage_reader=TensorReader(str(checkpoint.folder)), no_dist=processes.mesh is None)
        except (CheckpointException, pickle.UnpicklingError, RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{checkpoint.folder} does not fit this run: {_root_cause(error)}; was it written by another version "
                "of adlm?"
            ) from None


def find_checkpoint(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there are no checkpoints. Later, damaged ones are reported.

    Changes nothing on disk: `set_damaged_aside` renames the damaged ones.
    """
    paths = _checkpoint_paths(folder)[::-1]
    for number, path in enumerate(paths):
        try:
            checkpoint = _verify(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else error
            report(f"checkpoint {path} is damaged ({problem}); using the one before it")
            continue
        return replace(checkpoint, damaged=tuple(paths[:number]))
    if paths:
        raise UserError(
            f"{folder} has {len(paths)} checkpoint(s), all of them damaged; restore one, or move {folder} away to "
            "start again"
        )
    return None


def set_damaged_aside(checkpoint: Checkpoint) -> None:
    """Rename the damaged checkpoints that are later than this one."""
    for path in checkpoint.damaged:
        aside = path.with_name(f"{path.name}.damaged")
        if aside.exists():
            remove_folder(aside)
        path.rename(aside)


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the last `keep` and the one with the lowest validation bound."""
    paths = _checkpoint_paths(folder)
    bounds = {path: nats for path in paths if (nats := _validation_nats(path)) is not None}
    retained = {*paths[-keep:], *([min(bounds, key=lambda path: bounds[path])] if bounds else [])}
    for path in paths:
        if path not in retained:
            remove_folder(path)


def _checkpoint_paths(folder: Path) -> list[Path]:
    """In the order of their steps."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdecimal())


def describe_last(folder: Path) -> str:
    """For error messages: the checkpoint that a run would resume from."""
    paths = _checkpoint_paths(folder)
    return f"the last checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08}"


def _validation_nats(path: Path) -> float | None:
    try:
        nats = _read_manifest(path)["nats"]
    except (OSError, ValueError, KeyError):
        return None
    return float(nats) if isinstance(nats, (int, float)) else None


def _read_manifest(path: Path) -> dict[str, Any]:
    """The content of checkpoint.json; ValueError if its checksum differs."""
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        manifest = parse_json(read_bytes(path / MANIFEST))
    except ValueError:
        raise ValueError(f"{MANIFEST} cannot be read") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _checksum(manifest):
        raise ValueError(f"{MANIFEST} was modified: its checksum differs")
    return manifest


def _verify(path: Path) -> Checkpoint:
    """The checkpoint, if every file has its recorded size and checksum; else an error that names the file."""
    manifest = _read_manifest(path)
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, and this version reads format {FORMAT}")
    counters = parse_counters(manifest["counters"])
    files: Mapping[str, dict[str, Any]] = manifest["files"]
    for name, entry in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (path / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
    with ThreadPoolExecutor() as threads:
        entries = threads.map(lambda name: _size_and_checksum(path / name), files)
        for name, entry in zip(files, entries, strict=True):
            if entry != files[name]:
                raise ValueError(f"{name} was modified: its checksum differs")
    return Checkpoint(path, counters, dict(manifest["config"]))


def _size_and_checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _write_errors_as_user_errors(path: Path, part: Path) -> Iterator[None]:
    """If writing fails, delete the partial checkpoint and raise a UserError."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"checkpoint {path} cannot be written: {_root_cause(error)}; free disk space or make the folder writable, "
            f"then rerun the same command: {describe_last(path.parent)}"
        ) from None


def _root_cause(error: BaseException) -> str:
    """The message of the original error, without torch's wrapping."""
    if isinstance(error, CheckpointException):
        failure = next(iter(error.failures.values()))
        return _root_cause(failure[0] if isinstance(failure, tuple) else failure)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).partition("\n")[0]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sync(folder: Path) -> None:
    """fsync the folder, so that renames in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
