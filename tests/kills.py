"""Kills at every file operation of a command: machinery for tests, which knows no command.

A child process runs a command of `adlm` and counts what it does to files below a folder: an audit hook sees files
opened for writing, renamed, linked, removed, truncated, and folders made and removed; `os.fsync` and the exchange of
two names are wrapped. The first child counts; each of the following ones is killed (SIGKILL) just before one of these
operations and the same command is run again. The folder must then be what it is after an uninterrupted run: the same
files, the same bytes.

Not seen: writes into a file that is open (a kill during one is a kill before the next operation, with all or nothing of
what was written flushed), and files that are not opened by Python: model.safetensors, which safetensors writes in Rust
(the chmod after it is seen).
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

from adlm.training.metrics import CLOCKS

Files = dict[str, bytes]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events with the positions of their paths, each with that of its folder's descriptor.
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
    """Counts operations below a folder, and kills this process before the one of number `fatal`, from 1."""

    def __init__(self, folder: Path, fatal: int = 0):
        self.folder, self.fatal, self.names = os.path.realpath(folder), fatal, []
        sys.addaudithook(self._hear)
        fsync = os.fsync
        os.fsync = lambda descriptor: (self._count("fsync", descriptor), fsync(descriptor))[1]
        from adlm import files

        exchange = files._exchange
        files._exchange = lambda one, other: (self._count("exchange", one), exchange(one, other))[1]

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[2], int) and values[2] & WRITES:
            self._count(event, values[0])
        for path, descriptor in EVENTS.get(event, ()):
            if self._count(event, values[path], -1 if descriptor is None else values[descriptor]):
                break

    def _count(self, event: str, path: Any, folder: int = -1) -> bool:
        if isinstance(path, int):
            place = os.readlink(f"/proc/self/fd/{path}")
        else:
            above = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
            place = os.path.normpath(os.path.join(above, os.fsdecode(path)))
        if not place.startswith(f"{self.folder}/"):
            return False
        self.names.append(f"{event} {place.removeprefix(self.folder)}")
        if len(self.names) == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return True


def _command(words: Sequence[str], folder: Path, fatal: int, counted: Path | None) -> None:
    """In a child: the command, its operations counted."""
    import torch

    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    ctypes.CDLL(None)  # imported before anything is counted
    from adlm.cli.main import main

    operations = Operations(folder, fatal)
    code = main(list(words))
    if counted is not None:
        counted.write_text(json.dumps(operations.names))
    os._exit(code)


def contents(folder: Path, normal: Mapping[str, Callable[[bytes], bytes]] | None = None) -> Files:
    """Every file below a folder by its name, folders with a / at their end; `normal` takes clocks out of a file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[f"{name}/"] = b""
        else:
            found[name] = (normal or {}).get(path.name, bytes)(path.read_bytes())
    return found


def without_clocks(metrics: bytes) -> bytes:
    """metrics.jsonl without what depends on the machine and the hour."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    return json.dumps([{name: line[name] for name in line if name not in CLOCKS} for line in lines]).encode()


def check_kills(
    words: Sequence[str],
    folder: Path,
    normal: Mapping[str, Callable[[bytes], bytes]] | None = None,
    stride: int = 1,
    begin: Callable[[], None] = lambda: None,
) -> list[str]:
    """Kill a command before every `stride`-th operation below `folder`, run it again, compare; its operations by name.

    `folder` is emptied before each, and `begin` puts into it what is there when the command starts.
    """
    counted = folder.with_name(f"{folder.name}.counted")

    def start(fatal: int = 0, names: Path | None = None) -> int:
        return forked(_command, list(words), folder, fatal, names)

    def afresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin()

    afresh()
    assert start(names=counted) == 0
    operations = json.loads(counted.read_text())
    unbroken = contents(folder, normal)
    for number in range(1, len(operations) + 1, stride):
        afresh()
        at = f"killed before operation {number} of {len(operations)}: {operations[number - 1]}"
        assert start(number) == -signal.SIGKILL, at
        assert start() == 0, at
        now = contents(folder, normal)
        assert now.keys() == unbroken.keys(), at
        assert [name for name in now if now[name] != unbroken[name]] == [], at
    return operations
