"""Training checkpoints: all tensors of a run as safetensors, counters and config as JSON. Loading executes no code.

RUN/checkpoints/step-00001000/ holds tensors.safetensors (weights, EMA and optimizer moments, unsharded) and
checkpoint.json (counters, the run's config, size and checksum of the tensors, and a checksum of its own content). A
checkpoint is written under a temporary name and renamed, so it is complete or absent. The main process writes it; any
number of processes can read it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adlm.checkpoints.model_folder import write_tensors
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, remove_folder, replacing_folder
from adlm.training.metrics import Counters, parse_counters
from adlm.training.sharding import gather_tensors, load_tensor

MANIFEST, TENSORS = "checkpoint.json", "tensors.safetensors"
FORMAT = 3


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint on disk."""

    folder: Path
    counters: Counters
    config: Mapping[str, Any]
    """Of the run when the checkpoint was saved, as nested dicts."""
    damaged: tuple[Path, ...] = ()
    """Later checkpoints, which are damaged."""


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    counters: Counters,
    nats: float | None,
    config: Mapping[str, Any],
    processes: Processes,
) -> None:
    """Write a checkpoint of this step atomically. A collective call: every process must make it.

    `nats` is the validation bound, if it was computed at this step.
    """
    gathered = gather_tensors(tensors, processes)

    def write() -> None:
        try:
            with replacing_folder(folder / checkpoint_name(counters.step)) as part:
                write_tensors(gathered, part / TENSORS)
                manifest = {
                    "format": FORMAT,
                    "counters": asdict(counters),
                    "nats": nats if nats is not None and math.isfinite(nats) else None,
                    "config": config,
                    "tensors": _size_and_checksum(part / TENSORS),
                }
                write_manifest(part / MANIFEST, manifest)
        except UserError as error:
            raise UserError(f"checkpoint {error}; {describe_last(folder)}") from None

    processes.on_main_process(write)


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """checkpoint.json, with the checksum of its content."""
    text = json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1, allow_nan=False)
    path.write_text(text, encoding="utf-8")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def load_tensors(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Load the checkpoint into the tensors. Every process reads the file, and keeps its own shards."""
    try:
        with safe_open(checkpoint.folder / TENSORS, framework="pt") as file:
            for name, tensor in tensors.items():
                saved = file.get_tensor(name)
                if saved.shape != tensor.shape:
                    raise ValueError(f"{name} has shape {tuple(saved.shape)} instead of {tuple(tensor.shape)}")
                load_tensor(tensor, saved)
    except (SafetensorError, OSError, ValueError, AttributeError) as error:  # AttributeError: a dtype that torch lacks
        raise UserError(
            f"{checkpoint.folder} does not fit this run: {error}; was it written by another version of adlm?"
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
    """The checkpoint, if its files have their recorded sizes and checksums; else an error that names the file."""
    manifest = _read_manifest(path)
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, and this version reads format {FORMAT}")
    counters = parse_counters(manifest["counters"])
    if not (path / TENSORS).is_file():
        raise ValueError(f"{TENSORS} is missing")
    size, expected = (path / TENSORS).stat().st_size, manifest["tensors"]["bytes"]
    if size != expected:
        raise ValueError(f"{TENSORS} has {size:,} bytes instead of {expected:,}")
    if _size_and_checksum(path / TENSORS) != manifest["tensors"]:
        raise ValueError(f"{TENSORS} was modified: its checksum differs")
    return Checkpoint(path, counters, dict(manifest["config"]))


def _size_and_checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
