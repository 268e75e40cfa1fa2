"""Processes and devices: joining the processes that torchrun started, communication between them, device, CPU threads.

A single process takes the same code path, as rank 0 of 1.
"""

import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from adlm.errors import UserError

Item = TypeVar("Item")

GROUP_TIMEOUT = timedelta(days=1)  # processes wait for the slowest one
TRAINING_TIMEOUT = timedelta(minutes=30)  # they take their steps together
STORE_TIMEOUT = timedelta(seconds=10)
COMMUNICATION = re.compile(r"gloo|NCCL|Timed out waiting|Connection (closed|reset|refused)", re.IGNORECASE)
"""Errors of torch's communication."""
LOCATION = re.compile(r"^\[\S+\] ")
"""The place in gloo's source, before the text of an error."""
DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,3})?|mps(:0)?")
REMEDY = "start several processes with torchrun, or unset WORLD_SIZE"
MAX_THREADS = torch.get_num_threads()  # read before a run lowers it: one per physical core


@dataclass(frozen=True)
class Processes:
    """This process's rank and device, and communication with the other processes."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh | None
    """None for a single process."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which writes files and reports progress."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over all processes. On the CPU, without synchronizing with the GPU."""
        if self.mesh is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers)
        return [float(number) for number in numbers]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, on the tensor's device, without synchronizing with it."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor / self.num_ranks

    def broadcast(self, value: Any, group: dist.ProcessGroup | None = None) -> Any:
        """The value that rank 0 passes, on every process."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def on_main_process(self, function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
        """Call `function` on rank 0, while the others wait; its result there, None elsewhere.

        A UserError on rank 0 is raised on every process.
        """
        result = problem = None
        if self.is_main_process:
            try:
                result = function()
            except UserError as error:
                problem = str(error)
        problem = self.broadcast(problem, group)
        if problem is not None:
            raise UserError(problem)
        return result

    def main_process_first(self, function: Callable[[], Any]) -> Any:
        """The result of `function`, which rank 0 calls before the others do, however long it takes."""
        group = None if self.mesh is None else dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        result = self.on_main_process(function, group)
        return result if self.is_main_process else function()


@contextmanager
def process_group(
    report: Callable[[str], None], backend: str = "gloo", timeout: timedelta = GROUP_TIMEOUT
) -> Iterator[bool]:
    """Join the process group; yields whether this is the process that prints and writes (rank 0).

    `report` is called with one line if joining takes long. Communication that takes longer than `timeout` is a user
    error which names the processes that are missing.
    """
    rank, world_size = _environment_rank_and_size()
    if world_size == 1:
        yield True
        return
    _join(rank, world_size, report, backend, timeout)
    try:
        yield rank == 0
        with suppress(UserError):  # another process has failed, and reports its own error
            gather([])  # leave together: a process that exits early can abort the communication of the others
    except UserError:
        is_first_to_report()  # register now: once this process is gone, the waiting processes report errors as well
        raise
    except RuntimeError as error:
        if not COMMUNICATION.search(str(error)):
            raise
        problem = _lost_processes(error)
        is_first_to_report()
        raise problem from None
    finally:
        dist.destroy_process_group()


def _environment_rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE of the environment, as torchrun sets them; (0, 1) if WORLD_SIZE is not set."""
    world_size = _environment_number("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
    if world_size < 2:
        return 0, 1
    rank = _environment_number("RANK", 0)
    if rank >= world_size:
        raise UserError(f"RANK {rank} must be from 0 to {world_size - 1}, since WORLD_SIZE is {world_size}; {REMEDY}")
    if "LOCAL_RANK" in os.environ:
        _environment_number("LOCAL_RANK", 0)
    return rank, world_size


def _environment_number(name: str, minimum: int) -> int:
    value = os.environ.get(name)
    if value is None:
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {name} is not set; {REMEDY}")
    if not value.isdecimal() or len(value) > 9 or int(value) < minimum:
        raise UserError(f"the environment variable {name} {value!r} must be a whole number from {minimum}; {REMEDY}")
    return int(value)


def _join(rank: int, world_size: int, report: Callable[[str], None], backend: str, timeout: timedelta) -> None:
    """Initialize the process group; a process that waits long for the others reports it."""
    if "MASTER_ADDR" not in os.environ:
        raise UserError(f"WORLD_SIZE is {world_size} and MASTER_ADDR is not set; {REMEDY}")
    host, port = os.environ["MASTER_ADDR"], _environment_number("MASTER_PORT", 1)
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError, OverflowError):
        raise UserError(f"MASTER_ADDR {host!r} and MASTER_PORT {port} are not an address; {REMEDY}") from None
    message = f"adlm: process {rank} is waiting for all {world_size} processes at {host}:{port} ({REMEDY})"
    timer = threading.Timer(STORE_TIMEOUT.total_seconds(), report, [message])
    timer.daemon = True
    timer.start()
    try:
        store, *_ = next(rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(str(num_restarts()), store)  # type: ignore[attr-defined]  # keys of earlier attempts stay
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the {world_size} processes cannot connect to each other at {host}:{port} ({reason}); {REMEDY}"
        ) from None
    finally:
        timer.cancel()


def num_restarts() -> int:
    """How often torchrun has restarted the processes."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


@functools.cache
def is_first_to_report() -> bool:
    """Whether this is the first process with a user error; True as well if the store cannot be reached."""
    try:
        return bool(_connect().add(f"adlm-user-errors-{num_restarts()}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def _connect() -> Any:
    """The store in which all processes can read and write, over a connection of its own."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)  # type: ignore[attr-defined]


def local_device(name: str, option: str = "device") -> torch.device:
    """The device of this process: `cuda` without an index is the GPU of LOCAL_RANK. Sets the current CUDA device.

    `option` is where the name comes from, for the error message.
    """
    device = device_of(name, option)
    if "LOCAL_RANK" in os.environ and str(device) == "cuda":
        local_rank = _environment_number("LOCAL_RANK", 0)
        try:
            device = device_of(f"cuda:{local_rank}")
        except UserError:
            num_gpus = torch.cuda.device_count()
            raise UserError(
                f"LOCAL_RANK {local_rank} has no GPU: this machine has {num_gpus}; "
                f"start torchrun with --nproc-per-node {num_gpus}"
            ) from None
    if str(device).startswith("cuda:"):
        torch.cuda.set_device(device)
    return device


def device_of(name: str | torch.device, option: str = "device") -> torch.device:
    """An available torch device: cpu, cuda, cuda:N or mps; `auto` is a GPU if there is one. UserError otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not DEVICE_NAME.fullmatch(str(name)):
            raise ValueError
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError):
        raise UserError(f"{option} {str(name)!r:.60} is not one that torch sees here; try cpu") from None
    return device


def device_name(device: torch.device) -> str:
    """The GPU's model name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def rank_and_size() -> tuple[int, int]:
    """Rank and size of the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(items: list[Item]) -> list[Item]:
    """The items of all processes, concatenated in rank order."""
    gathered: list[list[Item]] = [items]
    if dist.is_initialized():
        gathered = [[] for _ in range(dist.get_world_size())]
        try:
            dist.all_gather_object(gathered, items)
        except RuntimeError as error:
            raise _lost_processes(error) from None
    return [item for process_items in gathered for item in process_items]


def _lost_processes(error: RuntimeError) -> UserError:
    """The user error of communication that failed: it names the processes that do not report this failure as well.

    They report it in the store, and have some seconds to do so.
    """
    rank, num_ranks = rank_and_size()
    reason = LOCATION.sub("", str(error).partition("\n")[0])
    missing = [other for other in range(num_ranks) if other != rank]
    end = time.monotonic() + STORE_TIMEOUT.total_seconds()
    with suppress(KeyError, ValueError, RuntimeError):
        store = _connect()
        keys = [f"adlm-lost-{num_restarts()}-{other}" for other in range(num_ranks)]
        store.set(keys[rank], "")
        while len(missing) > 1 and time.monotonic() < end:
            missing = [other for other in missing if not store.check([keys[other]])]
            time.sleep(0.1)
    who = " or ".join(map(str, missing))
    return UserError(f"process {who} of {num_ranks} has ended or does not answer ({reason})")


def default_threads() -> int:
    """The number of CPU threads if none is configured: OMP_NUM_THREADS, else the number of idle CPUs.

    More threads than idle CPUs wait for each other at every operation: on two busy cores, quickstart/adlm trains at
    3,900 tokens/s with 1 thread and at 1,700 to 2,700 with 2.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return MAX_THREADS
    return max(1, min(MAX_THREADS, round(idle_cpus())))


def idle_cpus(seconds: float = 0.3) -> float:
    """The number of idle CPUs in this process's affinity mask, from /proc/stat; all CPUs if there is no such file."""
    before = _cpu_times()
    if not before:
        return float(os.cpu_count() or 1)
    time.sleep(seconds)
    after = _cpu_times()
    idle_shares = []
    for cpu, (idle, total) in before.items():
        elapsed = after[cpu][1] - total
        idle_shares.append((after[cpu][0] - idle) / elapsed if elapsed else 1.0)
    return sum(idle_shares)


def _cpu_times() -> dict[int, tuple[int, int]]:
    """(idle, total) ticks of every CPU in the affinity mask; empty if there is no /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        usable = os.sched_getaffinity(0)
    except (OSError, AttributeError):  # macOS has neither
        return {}
    times: dict[int, tuple[int, int]] = {}
    for name, *ticks in map(str.split, lines):
        if name[:3] == "cpu" and name[3:] and int(name[3:]) in usable:
            # The fields after the first 8 (guest times) are included in `user`.
            user, nice, system, idle, iowait, *others = map(int, ticks[:8])
            times[int(name[3:])] = idle + iowait, user + nice + system + idle + iowait + sum(others)
    return times
