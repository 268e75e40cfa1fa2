"""The folder of a run: what lies where, whose it is now, and whether a config may go on in it. Knows no tensors.

RUN/config.yaml     the run, resolved: itself a preset
RUN/model           the averaged weights of the last snapshot, a model folder; RUN/best those of the lowest bound
RUN/snapshots       to resume from
RUN/metrics.jsonl   the logbook; RUN/samples texts; RUN/data the shards, where the run prepared its own
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adlm.config.load import differences, read, save, to_mapping
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import write_file
from adlm.model_folder import WEIGHTS

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
        return read(self.place / CONFIG) if (self.place / CONFIG).is_file() else None


@contextmanager
def held(place: Path) -> Iterator[RunFolder]:
    """The folder, made where there is none, and nobody else's as long as we are in it."""
    if place.is_dir() and not (place / CONFIG).is_file() and _foreign(place):
        raise UserError(f"{place} is no run of adlm and is not empty; give another --out")
    if (place / WEIGHTS).is_file():
        raise UserError(f"{place} is a model folder, not a run; give another --out")
    began_here = not place.exists()
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "lock").open("w")
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror}; give another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{place} is being trained by another process; wait for it, or stop it") from None
        try:
            yield RunFolder(place)
        except UserError:
            if began_here and [entry.name for entry in place.iterdir()] == ["lock"]:
                shutil.rmtree(place)  # what was refused before it began leaves nothing behind
            raise


def _foreign(place: Path) -> bool:
    ours = {"lock", "data", "data.preparing", TEXT}  # a run that was stopped while it prepared its text
    return any(entry.name not in ours for entry in place.iterdir())


def admit(run: RunFolder, config: Config, fingerprint: str) -> None:
    """Refuse a config that is not the run's, with the difference, and a text that is not; keep what is."""
    before, text = run.config, run.place / TEXT
    if before is not None:
        if text.is_file() and text.read_text(encoding="utf-8").strip() != fingerprint:
            raise UserError(
                f"{run.place} holds a run on another text: the shards are not those it was trained on; put them back, "
                "or give another --out for a new run"
            )
        changed = differences(to_mapping(before), to_mapping(config))
        refused = {knob: values for knob, values in changed.items() if knob not in MAY_CHANGE}
        if refused:
            told = ", ".join(f"{knob} {was} -> {now}" for knob, (was, now) in refused.items())
            raise UserError(
                f"{run.place} holds a run with another config ({told}); give the same knobs to resume it, or another "
                "--out for a new run"
            )
        if not changed:
            return
        steps = [int(folder.name.partition("-")[2]) for folder in run.snapshots.glob("step-*")]
        if steps and config.train.steps < max(steps):
            raise UserError(
                f"train.steps {config.train.steps} is less than the {max(steps)} steps that {run.place} has done; give "
                f"more, or resume it as it is by `adlm train --out {run.place}`"
            )
    write_file(text, f"{fingerprint}\n")
    save(config, run.place / CONFIG)
