"""The folder of a run: its layout, its lock, its checkpoints, and whether a config can resume the run in it.

RUN/config.yaml     the resolved config, usable as a preset
RUN/model           model folder with the EMA weights of the last checkpoint; RUN/best of the lowest validation bound
RUN/checkpoints     training checkpoints to resume from
RUN/metrics.jsonl   metrics of the logged steps
RUN/samples         generated texts
RUN/commits.txt     git commits of adlm that trained the run, in order, as far as they are known
RUN/data            prepared data, if the run prepared its own

RUN/checkpoints/step-00001000/ holds tensors.safetensors (weights, EMA and optimizer moments, unsharded) and
checkpoint.json (counters, the run's config, size and checksum of the tensors, and a checksum of its own content). A
checkpoint is written under a temporary name and renamed, so it is complete or absent. The main process writes it; any
number of processes can read it. Loading executes no code.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adlm import UNKNOWN_COMMIT, code_commit
from adlm.checkpoints.model_folder import WEIGHTS, write_tensors
from adlm.config.load import ADAPTER, differences, load_config, merge, save_config, to_mapping
from adlm.config.schema import Config
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.files import (
    PART,
    lock_file,
    parse_json,
    read_bytes,
    remove_folder,
    remove_parts,
    replacing_folder,
    reporting_os_errors,
    write_file,
)
from adlm.training.metrics import Counters, parse_counters
from adlm.training.sharding import gather_tensors, load_tensor

CONFIG, FINGERPRINT, COMMITS = "config.yaml", "text.sha256", "commits.txt"
MANIFEST, TENSORS = "checkpoint.json", "tensors.safetensors"
FORMAT = 3  # of checkpoints

# Options that may change when a run is resumed: execution, logging, the number of steps, and the location of the data.
MAY_CHANGE = {
    *(f"train.{option}" for option in ("steps", "micro_batch", "shard", "recompute", "precision", "compile", "device")),
    *(f"train.{option}" for option in ("threads", "log_every", "valid_every", "valid_rows", "sample_every", "samples")),
    *(f"train.{option}" for option in ("checkpoint_every", "keep", "skip_limit", "tensorboard", "wandb")),
    *("data.root", "data.path", "data.prepared"),
    "tokenizer",  # `vocabulary` must stay the same
}
# Options that are filled in when the data is opened.
DATA_OPTIONS = {"vocabulary", "train.base_sha256", "data.packing", "data.format", "data.name", "data.hub"}


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def config(self) -> Config | None:
        """The saved config; None for a new run."""
        return load_config(self.path / CONFIG) if (self.path / CONFIG).is_file() else None


@contextmanager
def open_run_folder(path: Path) -> Iterator[RunFolder]:
    """Create the folder if necessary and lock it, so that only one process trains in it."""
    with reporting_os_errors(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {path} is a file, and a run is a folder; give another --out")
        run_files = {
            "lock",
            "data",
            "data.preparing",
            FINGERPRINT,
        }  # of a run that was stopped while preparing its data
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
        if CONFIG not in names and any(name not in run_files and not name.endswith(PART) for name in names):
            raise UserError(f"{path} is not a run of adlm and is not empty; give another --out")
        if any((path / name).is_file() for name in (WEIGHTS, ADAPTER)):
            raise UserError(f"{path} is a model folder, not a run; give another --out")
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    with lock:
        lock_file(lock, f"another process is training in {path}; wait for it, or stop it")
        run = RunFolder(path)
        for folder in (path, run.checkpoints, run.samples, path / "data"):
            remove_parts(folder)
        try:
            yield run
        except UserError:
            if is_new and [entry.name for entry in path.iterdir()] == ["lock"]:
                shutil.rmtree(path)  # a run that is rejected before it starts leaves no folder
            raise


def check_options(
    run: RunFolder, previous: Mapping[str, Any], config: Config, include_data_options: bool = True
) -> list[str]:
    """UserError if an option differs that must not change on resuming; otherwise the changes, one message each.

    `previous` is the config of the checkpoint, or of the folder if there is none; options that are newer than it have
    their defaults. `include_data_options` False skips the options that are unknown before data and base model are
    opened.
    """
    changed = differences(merge(config_as_json(Config()), dict(previous)), config_as_json(config))
    rejected = {
        option: values
        for option, values in changed.items()
        if option not in MAY_CHANGE and (include_data_options or not _depends_on_data(option, config))
    }
    if rejected:
        changes = ", ".join(f"{option} {old} -> {new}" for option, (old, new) in rejected.items())
        raise UserError(
            f"{run.path} holds a run with another config ({changes}); give the same options to resume it, or another "
            "--out for a new run"
        )
    return [f"{option} {old} -> {new}" for option, (old, new) in changed.items()]


def _depends_on_data(option: str, config: Config) -> bool:
    """Whether an option is unknown before the data, or the model that is fine-tuned, is opened."""
    has_base = config.reason is not None and config.reason.base != ""
    return option in DATA_OPTIONS or option.startswith("vocabulary.") or (has_base and option.startswith("model."))


def check_progress(run: RunFolder, config: Config, fingerprint: str, num_done: int) -> None:
    """UserError if the run was started with another training text, or has done more than `train.steps` steps."""
    path = run.path / FINGERPRINT
    if path.is_file() and path.read_bytes().strip() != fingerprint.encode():
        raise UserError(
            f"{run.path} holds a run on another text: the training text has changed; restore it, or give another "
            "--out for a new run"
        )
    if config.train.steps < num_done:
        raise UserError(
            f"train.steps {config.train.steps} is less than the {num_done} steps that {run.path} has done; give more, "
            f"or resume it unchanged with `adlm train --out {run.path}`"
        )


def save_run(run: RunFolder, config: Config, fingerprint: str) -> None:
    """Write the config, the fingerprint of the text and the commit of this code, after all checks have passed."""
    write_file(run.path / FINGERPRINT, f"{fingerprint}\n")
    if run.config != config:
        save_config(config, run.path / CONFIG)
    commits = read_commits(run.path)
    if code_commit() not in (UNKNOWN_COMMIT, *commits[-1:]):
        write_file(run.path / COMMITS, "".join(f"{commit}\n" for commit in (*commits, code_commit())))


def read_commits(run: Path) -> list[str]:
    """The commits of adlm that trained a run, in order; empty where they are not known."""
    path = run / COMMITS
    return read_bytes(path).decode(errors="replace").split() if path.is_file() else []


def config_as_json(config: Config) -> dict[str, Any]:
    """The config as nested dicts of JSON types, as stored in a checkpoint."""
    return dict(json.loads(json.dumps(to_mapping(config))))


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
