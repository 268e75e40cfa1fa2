"""The folder of a run: what lies where, whose it is now, and whether a config may go on in it. Knows no tensors.

RUN/config.yaml     the run, resolved: itself a preset
RUN/model           the averaged weights of the last snapshot, a model folder; RUN/best those of the lowest bound
RUN/snapshots       to resume from
RUN/metrics.jsonl   the logbook; RUN/samples texts; RUN/data the shards, where the run prepared its own
"""

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.checkpoints.model_folder import WEIGHTS
from adlm.config.load import differences, load_config, save_config, to_mapping
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import PART, remove_parts, write_file, writing

CONFIG, TEXT = "config.yaml", "text.sha256"

# What may differ when a run goes on: how it is carried out and watched, how long it is, and where the text lies.
MAY_CHANGE = {
    "train.steps",
    "train.micro_batch",
    "train.replicate",
    "train.shard",
    "train.recompute",
    "train.precision",
    "train.compile",
    "train.device",
    "train.threads",
    "train.log_every",
    "train.valid_every",
    "train.valid_rows",
    "train.sample_every",
    "train.samples",
    "train.snapshot_every",
    "train.keep",
    "train.skip_limit",
    "train.tensorboard",
    "train.wandb",
    "data.root",
    "data.path",
    "data.prepared",
    "tokenizer",  # its ids are held to by `vocabulary`
}
# What only the text says: known when it is open.
OF_THE_TEXT = {"vocabulary", "data.packing", "data.name", "data.hub"}


@dataclass(frozen=True)
class RunFolder:
    place: Path

    @property
    def snapshots(self) -> Path:
        return self.place / "snapshots"

    @property
    def metrics(self) -> Path:
        return self.place / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.place / "samples"

    @property
    def config(self) -> Config | None:
        """Of the run that is there."""
        return load_config(self.place / CONFIG) if (self.place / CONFIG).is_file() else None


@contextmanager
def held(place: Path) -> Iterator[RunFolder]:
    """The folder, made where there is none, and nobody else's as long as we are in it."""
    with writing(place):
        if place.is_dir() and not (place / CONFIG).is_file() and _foreign(place):
            raise UserError(f"{place} is no run of adlm and is not empty; give another --out")
        if (place / WEIGHTS).is_file():
            raise UserError(f"{place} is a model folder, not a run; give another --out")
        began_here = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{place} is being trained by another process; wait for it, or stop it") from None
        run = RunFolder(place)
        for folder in (place, run.snapshots, run.samples, place / "data"):
            remove_parts(folder)
        try:
            yield run
        except UserError:
            if began_here and [entry.name for entry in place.iterdir()] == ["lock"]:
                shutil.rmtree(place)  # what was refused before it began leaves nothing behind
            raise


def _foreign(place: Path) -> bool:
    ours = {"lock", "data", "data.preparing", TEXT}  # a run that was stopped while it prepared its text
    return any(entry.name not in ours and not entry.name.endswith(PART) for entry in place.iterdir())


def check_knobs(run: RunFolder, before: Mapping[str, Any], config: Config, of_text: bool = True) -> list[str]:
    """Refuse a config that is not the run's, with the difference; what may differ and does, as lines to be said.

    `before` is the config of the snapshot that is resumed, or that of the folder. Without `of_text`, the knobs that the
    text decides are not compared yet.
    """
    changed = differences(before, mapping_of(config))
    refused = {
        knob: values
        for knob, values in changed.items()
        if knob not in MAY_CHANGE and (of_text or (knob not in OF_THE_TEXT and not knob.startswith("vocabulary.")))
    }
    if refused:
        told = ", ".join(f"{knob} {was} -> {now}" for knob, (was, now) in refused.items())
        raise UserError(
            f"{run.place} holds a run with another config ({told}); give the same knobs to resume it, or another "
            "--out for a new run"
        )
    return [f"{knob} {was} -> {now}" for knob, (was, now) in changed.items()]


def check_text(run: RunFolder, fingerprint: str) -> None:
    """Refuse a text that is not the run's."""
    text = run.place / TEXT
    if text.is_file() and text.read_bytes().strip() != fingerprint.encode():
        raise UserError(
            f"{run.place} holds a run on another text: this is not what it was trained on; put that back, or give "
            "another --out for a new run"
        )


def check_steps(run: RunFolder, config: Config, done: int) -> None:
    if config.train.steps < done:
        raise UserError(
            f"train.steps {config.train.steps} is less than the {done} steps that {run.place} has done; give more, or "
            f"resume it as it is by `adlm train --out {run.place}`"
        )


def keep(run: RunFolder, config: Config, fingerprint: str) -> None:
    """Write down what the run is, after everything was checked."""
    write_file(run.place / TEXT, f"{fingerprint}\n")
    if run.config != config:
        save_config(config, run.place / CONFIG)


def mapping_of(config: Config) -> dict[str, Any]:
    """The config as a snapshot keeps it: nested dicts of what JSON knows."""
    return dict(json.loads(json.dumps(to_mapping(config))))
