"""The folder of a run: its layout, its lock, and whether a config can resume the run in it.

RUN/config.yaml     the resolved config, usable as a preset
RUN/model           model folder with the EMA weights of the last checkpoint; RUN/best of the lowest validation bound
RUN/checkpoints     training checkpoints to resume from (`run_checkpoints`)
RUN/metrics.jsonl   metrics of the logged steps
RUN/samples         generated texts
RUN/commits.txt     git commits of adlm that trained the run, in order, as far as they are known
RUN/data            prepared data, if the run prepared its own
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm import UNKNOWN_COMMIT, code_commit
from adlm.checkpoints.model_folder import WEIGHTS
from adlm.config.load import ADAPTER, differences, load_config, merge, save_config, to_mapping
from adlm.config.schema import Config
from adlm.distributed import num_restarts
from adlm.errors import UserError
from adlm.files import PART, lock_file, read_bytes, remove_parts, reporting_os_errors, write_file

RESTART_SECONDS = 30  # that a process which torchrun restarted waits for the lock
CONFIG, FINGERPRINT, COMMITS = "config.yaml", "text.sha256", "commits.txt"
MOST_CHANGES = 5
"""Of the options that a message lists."""

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
        # torchrun restarts processes before those that it ended are gone from every machine
        seconds = RESTART_SECONDS if num_restarts() else 0
        lock_file(lock, f"another process is training in {path}; wait for it, or stop it", seconds)
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
        shown = [f"{option} {old} -> {new}" for option, (old, new) in rejected.items()]
        more = [f"and {len(shown) - MOST_CHANGES} more"] * (len(shown) > MOST_CHANGES)
        changes = ", ".join([*shown[:MOST_CHANGES], *more])
        raise UserError(
            f"{run.path} holds a run with another config ({changes}); give the same options to resume it, or another "
            "--out for a new run"
        )
    return [f"{option} {old} -> {new}" for option, (old, new) in changed.items()]


def _depends_on_data(option: str, config: Config) -> bool:
    """Whether an option is unknown before the data, or the model that is fine-tuned, is opened."""
    has_base = config.reason is not None and config.reason.base != ""
    return option in DATA_OPTIONS or option.startswith("vocabulary.") or (has_base and option.startswith("model."))


def check_text(run: RunFolder, config: Config, fingerprint: str) -> None:
    """UserError if the run was started with another training text."""
    path = run.path / FINGERPRINT
    if path.is_file() and path.read_bytes().strip() != fingerprint.encode():
        of_sources = ", or the order or the weights of its sources," * ("," in config.data.prepared)
        raise UserError(
            f"{run.path} holds a run on another text: the training text{of_sources} has changed; restore it, or give "
            "another --out for a new run"
        )


def check_steps(run: RunFolder, config: Config, num_done: int) -> None:
    """UserError if the run has done more than `train.steps` steps."""
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
