"""The checkpoints of a run: what is in their folders, which one a run resumes from, and which are deleted.

RUN/checkpoints/step-00001000/ holds weights, EMA and optimizer moments in one file a process that saved them
(tensors-00001-of-00002.safetensors, laid out as `checkpoints.tensor_files` says), and checkpoint.json (counters, the
run's config, size and checksum of every file, and a checksum of its own content). It is written under a temporary name
and renamed, so it is complete or absent (`saving`). Any number of processes can read it. Loading executes no code.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from adlm.checkpoints.tensor_files import read_rows
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, remove_folder
from adlm.training.metrics import Counters, parse_counters
from adlm.training.sharding import own_rows

MANIFEST = "checkpoint.json"
FORMAT = 4
WHOLE = 3  # the format before: one file, which is read as that of one process


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint on disk."""

    folder: Path
    counters: Counters
    config: Mapping[str, Any]
    """Of the run when the checkpoint was saved, as nested dicts."""
    files: tuple[str, ...]
    """With the tensors."""
    damaged: tuple[Path, ...] = ()
    """Later checkpoints, which are damaged."""


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """checkpoint.json, with the checksum of its content."""
    text = json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1, allow_nan=False)
    path.write_text(text, encoding="utf-8")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def load_tensors(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Load the checkpoint into the tensors. Every process reads its own shards."""
    try:
        files = [checkpoint.folder / name for name in checkpoint.files]
        read_rows(files, {name: own_rows(tensor) for name, tensor in tensors.items()})
    except ValueError as error:
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
            report(f"checkpoint {path} is damaged ({problem})" + "; using the one before it" * (path != paths[-1]))
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
    bounds = {}
    for path in paths:
        with suppress(OSError, ValueError, KeyError):
            if isinstance(nats := _read_manifest(path)["nats"], (int, float)):
                bounds[path] = nats
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
    if manifest["format"] not in (WHOLE, FORMAT):
        raise ValueError(f"its format is {manifest['format']}, and this version reads format {FORMAT}")
    counters = parse_counters(manifest["counters"])
    files = {"tensors.safetensors": manifest["tensors"]} if manifest["format"] == WHOLE else manifest["files"]
    for name, recorded in files.items():
        if Path(name).name != name or not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        size, expected = (path / name).stat().st_size, recorded["bytes"]
        if size != expected:
            raise ValueError(f"{name} has {size:,} bytes instead of {expected:,}")
        if size_and_checksum(path / name) != recorded:
            raise ValueError(f"{name} was modified: its checksum differs")
    return Checkpoint(path, counters, dict(manifest["config"]), tuple(files))


def size_and_checksum(path: Path) -> dict[str, Any]:
    """As checkpoint.json records them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
