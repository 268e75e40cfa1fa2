"""Small runs for the tests of training: a corpus of two-word rhymes, knobs for a network of nothing, and processes."""

import fcntl
import json
import multiprocessing
import os
import pty
import random
import resource
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.data.prepare.prepare import prepare
from adlm.errors import UserError
from adlm.training import train as training
from adlm.training.metrics import CLOCKS, read_metrics
from adlm.training.train import TrainOutcome, train

SMALL = (
    "length=16",
    "model.hidden=16",
    "model.heads=2",
    "model.blocks=2",
    "model.condition=8",
    "model.bridge=hidden",
    "anchor.gamma=0.1",
    "train.batch_size=8",
    "train.steps=20",
    "train.learning_rate=3e-3",
    "train.warm_up_steps=2",
    "train.log_every=2",
    "train.valid_every=10",
    "train.valid_rows=6",
    "train.sample_every=0",
    "train.snapshot_every=1000",
    "sampling.steps=4",
)

Cases = Mapping[str, tuple[Path, Sequence[str]]]

# What a method needs beside its name.
NEEDS = {"sedd": ("schedule.eps=1e-3", "model.time_conditioning=true"), "d3pm": ("schedule.eps=1e-3", "time.steps=20")}


def corpus(folder: Path, lines: int = 400) -> Path:
    """A prepared folder of bytes: lines of words, each followed by the one that belongs to it."""
    pairs = ["sun moon", "king queen", "war peace", "law order", "day night"]
    chance = random.Random(0)
    text = folder / "rhymes.txt"
    text.write_text("\n".join(" ".join(chance.choices(pairs, k=3)) for _ in range(lines)))
    words = [f"data.path={text}", "data.boundary=line", "data.held_out=0.1", "tokenizer=bytes", "length=16"]
    prepare(resolve(words), folder / "prepared")
    return folder / "prepared"


class Quiet:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def start(self, start: Any) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def write(self, line: Any) -> None:
        pass

    def close(self) -> None:
        pass


def run(prepared: Path, out: Path, *words: str, screen: Quiet | None = None) -> TrainOutcome:
    """A small run to its end, in this process."""
    return train(resolve([*SMALL, f"data.prepared={prepared}", *words]), out, screen or Quiet())


def _child(prepared: Path, out: Path, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    limits = [int(word.removeprefix("limit=")) for word in words if word.startswith("limit=")]
    if limits:  # bytes that no file may exceed
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0], limits[0]))
    words = [word for word in words if not word.startswith("limit=")]
    try:
        outcome = run(prepared, out, *words)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.exit(128 + outcome.signal if outcome.signal else 0)


def _context() -> Any:
    """Children of a server that has torch imported already: they are there at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adlm.training.train", "torch.distributed.fsdp", "adlm.cli.main", "adlm.cli.train"])
    return context


def start(prepared: Path, out: Path, *words: str) -> BaseProcess:
    """The same run in a process of its own, which can be killed."""
    process: BaseProcess = _context().Process(target=_child, args=(prepared, out, words))
    process.start()
    return process


def forked(target: Callable[..., None], *values: Any) -> int:
    """What a function does in a process of its own; its exit code, or minus the signal that ended it."""
    process = _context().Process(target=target, args=values)
    process.start()
    process.join()
    assert process.exitcode is not None
    return int(process.exitcode)


def without_reader(words: Sequence[str]) -> None:
    """In a child: the command, its standard error a pipe that nobody reads, as after `2>&1 >/dev/null | head -2`."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os._exit(main(list(words)))


def with_closed_terminal(words: Sequence[str], signals: Sequence[int]) -> None:
    """In a child: the command on a terminal of its own, which is closed after the third step, as ssh closes one."""
    os.setsid()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(slave, descriptor)
    os.close(slave)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    step, count = training.train_step, iter(range(1000))

    def closing(*values: Any) -> Any:
        if next(count) == 3:
            os.close(master)
            for number in signals:
                time.sleep(0.05)
                os.kill(os.getpid(), number)
        return step(*values)

    training.train_step = closing
    os._exit(main(list(words)))


def _rank(rank: int, num: int, ports: Sequence[int], prepared: Path, cases: Cases) -> None:
    torch.set_num_threads(1)
    for port, (out, words) in zip(ports, cases.values(), strict=True):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        run(prepared, out, *words)


def run_on_two(prepared: Path, cases: Cases) -> None:
    """Runs over two processes, one after the other, as torchrun would start them."""
    ports = [_free_port() for _ in cases]
    both = [_context().Process(target=_rank, args=(rank, 2, ports, prepared, cases)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
        assert process.exitcode == 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def weights(out: Path, which: str = "model") -> dict[str, torch.Tensor]:
    return load_file(out / which / "model.safetensors")


def logged(out: Path) -> list[dict[str, Any]]:
    """The logbook without clocks and rates."""
    lines = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def card(out: Path, step: int) -> dict[str, Any]:
    return json.loads((out / "snapshots" / f"step-{step:08}" / "snapshot.json").read_text())
