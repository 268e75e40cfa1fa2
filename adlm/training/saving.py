"""Saving checkpoints while training goes on.

At the step of a checkpoint every process copies its part of the tensors to the CPU (`start`), which a thread of its own
writes. The processes learn from the sum of every step that all of them are ready; then the main process publishes the
checkpoint. So threads do not communicate, and no process gathers tensors.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from adlm.checkpoints.tensor_files import TensorRows, write_rows
from adlm.distributed import Processes, gather
from adlm.errors import UserError
from adlm.files import replacing_folder, reporting_os_errors, sync
from adlm.training.metrics import Counters
from adlm.training.run_checkpoints import (
    FORMAT,
    MANIFEST,
    checkpoint_name,
    describe_last,
    prune_checkpoints,
    size_and_checksum,
    write_manifest,
)
from adlm.training.sharding import rows_to_save


class Saving:
    """The checkpoint that is being saved, if there is one. `start` and `finish` are collective calls."""

    def __init__(self, folder: Path, processes: Processes, keep: int):
        self.folder, self.processes, self.keep = folder, processes, keep
        self._thread: threading.Thread | None = None
        self._part, self._closing = Path(), ExitStack()
        """The temporary folder, and, on the main process, what gives it its name."""
        self._manifest: dict[str, Any] = {}
        self._written: tuple[str, dict[str, Any]] | UserError
        """This process's file, with its size and checksum, or why there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """After an error one process completes its checkpoint. Of several processes the others may be gone."""
        if self._thread is None:
            return
        if error is None:
            self.finish()
        elif self.processes.num_ranks == 1:
            with suppress(UserError):
                self.finish()
        else:
            self._thread.join()
            self._closing.__exit__(kind, error, trace)

    def start(
        self, tensors: Mapping[str, Tensor], counters: Counters, nats: float | None, config: Mapping[str, Any]
    ) -> None:
        """Copy the tensors, and begin to write the checkpoint of this step; `finish` comes before.

        `nats` is the validation bound, if it was computed at this step.
        """
        path, nats = self.folder / checkpoint_name(counters.step), nats if math.isfinite(nats or 0) else None
        self._manifest = {"format": FORMAT, "counters": asdict(counters), "nats": nats, "config": config}
        self._part = self.processes.broadcast(self.processes.on_main_process(lambda: self._open(path)))
        rows = rows_to_save(tensors, self.processes)
        self._thread = threading.Thread(target=self._write, args=(path, rows), name="checkpoint", daemon=True)
        self._thread.start()

    def _open(self, path: Path) -> Path:
        with self._explained():
            return self._closing.enter_context(replacing_folder(path))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"checkpoint {error}; {describe_last(self.folder)}") from None

    def _write(self, path: Path, rows: Mapping[str, TensorRows]) -> None:
        """In the thread: write this process's file."""
        rank, num_ranks = self.processes.rank, self.processes.num_ranks
        problem = f"{path} cannot be written{f' by process {rank}' if num_ranks > 1 else ''}"
        self._written = UserError(problem)
        try:
            with reporting_os_errors(path, problem):
                file = self._part / f"tensors-{rank + 1:05}-of-{num_ranks:05}.safetensors"
                write_rows(rows, file)
                sync(file)
                self._written = file.name, size_and_checksum(file)
        except UserError as error:
            self._written = error

    @property
    def is_written(self) -> bool:
        """Whether this process has written its file of a checkpoint that is not published yet, or failed to."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the checkpoint is written, and publish it; UserError if a process could not write its file."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            files = gather([self._written])
            self.processes.on_main_process(lambda: self._publish(files))

    def _publish(self, files: list[tuple[str, dict[str, Any]] | UserError]) -> None:
        """On the main process: give the checkpoint its name, and delete older ones."""
        with self._explained(), self._closing.pop_all():
            recorded = {}
            for written in files:
                if isinstance(written, UserError):
                    raise written
                recorded[written[0]] = written[1]
            write_manifest(self._part / MANIFEST, {**self._manifest, "files": recorded})
        prune_checkpoints(self.folder, self.keep)

    def describe_last(self) -> str:
        """For error messages: the checkpoint that the run would resume from. One process completes its own first."""
        if self.processes.num_ranks == 1:
            self.finish()
        return describe_last(self.folder)
