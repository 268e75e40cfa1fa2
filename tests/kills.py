"""Kills a command before each of its file operations, and checks that it resumes. Independent of the command.

A child process runs a command of `adlm` and counts its operations on files below a folder: an audit hook observes
files opened for writing, renames, links, removals, truncations, and folders created and removed; `os.fsync` and the
atomic exchange of two names are wrapped. The first child counts; each following one is killed (SIGKILL) just before one
of these operations, and the same command is run again. The folder must then be the same as after an uninterrupted run:
the same files with the same bytes.

Not observed: writes to an open file (a kill during one is equivalent to a kill before the next operation, with all or
none of the data flushed).
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from small_runs import forked

from adlm.training.metrics import TIMING_METRICS

Files = dict[str, bytes]
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events: the argument positions of (path, descriptor of its folder), for each path of the event.
EVENTS = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
}


class Operations:
    """Counts operations below a folder, and kills this process before the one with number `fatal`, counted from 1."""

    def __init__(self, folder: Path, fatal: int = 0):
        self.folder, self.fatal, self.names = os.path.realpath(folder), fatal, []
        sys.addaudithook(self._audit)
        fsync = os.fsync
        os.fsync = lambda descriptor: (self._count("fsync", descriptor), fsync(descriptor))[1]
        from adlm import files

        exchange = files._exchange
        files._exchange = lambda one, other: (self._count("exchange", one), exchange(one, other))[1]

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[2], int) and values[2] & WRITE_FLAGS:
            self._count(event, values[0])
        for path, descriptor in EVENTS.get(event, ()):
            if self._count(event, values[path], -1 if descriptor is None else values[descriptor]):
                break

    def _count(self, event: str, path: Any, folder: int = -1) -> bool:
        if isinstance(path, int):
            location = os.readlink(f"/proc/self/fd/{path}")
        else:
            parent = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
            location = os.path.normpath(os.path.join(parent, os.fsdecode(path)))
        if not location.startswith(f"{self.folder}/"):
            return False
        self.names.append(f"{event} {location.removeprefix(self.folder)}")
        if len(self.names) >= self.fatal > 0:  # threads count, too
            os.kill(os.getpid(), signal.SIGKILL)
        return True


def _command(words: Sequence[str], folder: Path, fatal: int, report: Path | None) -> None:
    """In a child: run the command and write the names of its operations to `report`."""
    import torch

    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    ctypes.CDLL(None)  # loaded before operations are counted
    from adlm.cli.main import main

    operations = Operations(folder, fatal)
    code = main(list(words))
    if report is not None:
        report.write_text(json.dumps(operations.names))
    os._exit(code)


def contents(folder: Path, normal: Mapping[str, Callable[[bytes], bytes]] | None = None) -> Files:
    """Every file below a folder by its name, folders with a trailing /; `normal` removes timings from a file."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            files[f"{name}/"] = b""
        else:
            files[name] = (normal or {}).get(path.name, bytes)(path.read_bytes())
    return files


def without_timings(metrics: bytes) -> bytes:
    """metrics.jsonl without the metrics that depend on the machine."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    return json.dumps([{name: line[name] for name in line if name not in TIMING_METRICS} for line in lines]).encode()


def check_kills(
    words: Sequence[str],
    folder: Path,
    normal: Mapping[str, Callable[[bytes], bytes]] | None = None,
    stride: int = 1,
    set_up: Callable[[], None] = lambda: None,
) -> list[str]:
    """Kill a command before every `stride`-th operation below `folder`, rerun it and compare; returns all operations.

    `folder` is emptied before each, and `set_up` creates the files that exist when the command starts.
    """
    report = folder.with_name(f"{folder.name}.operations")

    def start(fatal: int = 0, report: Path | None = None) -> int:
        return forked(_command, list(words), folder, fatal, report)

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        set_up()

    reset()
    assert start(report=report) == 0
    operations = json.loads(report.read_text())
    uninterrupted = contents(folder, normal)
    for number in range(1, len(operations) + 1, stride):
        reset()
        message = f"killed before operation {number} of {len(operations)}: {operations[number - 1]}"
        assert start(number) == -signal.SIGKILL, message
        assert start() == 0, message
        now = contents(folder, normal)
        assert now.keys() == uninterrupted.keys(), message
        changed = [name for name in now if now[name] != uninterrupted[name]]
        assert not changed, f"{message}; changed: {changed}"
    return operations
