"""Small runs for the tests of training: a corpus of word pairs, options for a tiny network, child processes."""

import fcntl
import multiprocessing
import os
import pty
import random
import resource
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from adlm.training.metrics import TIMING_METRICS, read_metrics
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
    "train.checkpoint_every=1000",
    "sampling.steps=4",
)

Cases = Mapping[str, tuple[Path, Sequence[str]]]

# Options that a method needs besides its name.
NEEDS = {"sedd": ("schedule.eps=1e-3", "model.time_conditioning=true"), "d3pm": ("schedule.eps=1e-3", "time.steps=20")}


def corpus(folder: Path, lines: int = 400) -> Path:
    """A prepared folder with byte tokens: lines of word pairs, in which the first word determines the second."""
    pairs = ["sun moon", "king queen", "war peace", "law order", "day night"]
    rng = random.Random(0)
    text = folder / "rhymes.txt"
    text.write_text("\n".join(" ".join(rng.choices(pairs, k=3)) for _ in range(lines)))
    words = [f"data.path={text}", "data.boundary=line", "data.held_out=0.1", "tokenizer=bytes", "length=16"]
    prepare(resolve(words), folder / "prepared")
    return folder / "prepared"


class RecordingReporter:
    """A reporter that records the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def info(self, message: str) -> None:
        self.messages.append(message)

    def start(self, start: Any) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def write(self, line: Any) -> None:
        pass

    def close(self) -> None:
        pass


def run(prepared: Path, out: Path, *words: str, reporter: RecordingReporter | None = None) -> TrainOutcome:
    """A complete small run in this process."""
    return train(resolve([*SMALL, f"data.prepared={prepared}", *words]), out, reporter or RecordingReporter())


def _child(prepared: Path, out: Path, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    limits = [int(word.removeprefix("limit=")) for word in words if word.startswith("limit=")]
    if limits:  # maximal file size in bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0], limits[0]))
    for word in words:
        if word.startswith("signal="):
            _signal_before_step(5, int(word.removeprefix("signal=")))
    words = [word for word in words if not word.startswith(("limit=", "signal="))]
    try:
        outcome = run(prepared, out, *words)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.exit(128 + outcome.signal if outcome.signal else 0)


def _signal_before_step(step: int, number: int) -> None:
    """In a child: it receives the signal just before its training step `step`, counted from 1."""
    train_step, count = training.train_step, iter(range(1, 1000))

    def signalling(*values: Any) -> Any:
        if next(count) == step:
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # a thread handles it, and on busy cores a small step is faster
        return train_step(*values)

    training.train_step = signalling


def preload() -> Any:
    """A fork server that has imported torch already, so that children start quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adlm.training.train", "torch.distributed.fsdp", "adlm.cli.main", "adlm.cli.train"])
    return context


def start(prepared: Path, out: Path, *words: str) -> BaseProcess:
    """The same run in a child process, which can be killed.

    Two words are not of the config: `limit=N` limits files to N bytes; `signal=N` sends signal N before step 5.
    """
    process: BaseProcess = preload().Process(target=_child, args=(prepared, out, words))
    process.start()
    return process


def forked(target: Callable[..., None], *values: Any) -> int:
    """Call a function in a child process; its exit code, or minus the signal that ended it."""
    process = preload().Process(target=target, args=values)
    process.start()
    process.join()
    assert process.exitcode is not None
    return int(process.exitcode)


def without_reader(words: Sequence[str]) -> None:
    """In a child: the command with standard error a pipe without a reader, as after `2>&1 >/dev/null | head -2`."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os._exit(main(list(words)))


def with_closed_terminal(words: Sequence[str], signals: Sequence[int]) -> None:
    """In a child: the command on its own terminal, which is closed after the third step, as when ssh disconnects."""
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


def with_repeated_ctrl_c(words: Sequence[str], errors: Path) -> None:
    """In a child: the command, which receives five SIGINT from the third step on; `errors` is its standard error."""
    sys.stderr = errors.open("w")
    step, count = training.train_step, iter(range(1000))

    def interrupt() -> None:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)

    def interrupted(*values: Any) -> Any:
        if next(count) == 3:
            threading.Thread(target=interrupt, daemon=True).start()
        return step(*values)

    training.train_step = interrupted
    code = main(list(words))
    sys.stderr.flush()
    os._exit(code)


def _rank(rank: int, num: int, ports: Sequence[int], prepared: Path, cases: Cases) -> None:
    torch.set_num_threads(1)
    for port, (out, words) in zip(ports, cases.values(), strict=True):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        run(prepared, out, *words)


def run_on(num: int, prepared: Path, cases: Cases) -> None:
    """Runs on several processes each, one run after the other, as torchrun starts them."""
    ports = free_ports(len(cases))
    ranks = [preload().Process(target=_rank, args=(rank, num, ports, prepared, cases)) for rank in range(num)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0


def free_ports(num: int) -> list[int]:
    """Free ports below those that the kernel gives to connections, which could be taken before they are used."""
    ports: list[int] = []
    while len(ports) < num:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def weights(out: Path, which: str = "model") -> dict[str, torch.Tensor]:
    return load_file(out / which / "model.safetensors")


def logged(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without timings."""
    lines = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMING_METRICS} for line in lines]
