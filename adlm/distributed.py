"""Process groups and devices: joining the processes that torchrun started, gathering results, selecting a device.

A single process takes the same code path, as rank 0 of 1. Training builds its own device mesh (training/sharding.py).
"""

import functools
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from adlm.errors import UserError

Item = TypeVar("Item")

GROUP_TIMEOUT = timedelta(days=1)  # processes wait for the slowest one
STORE_TIMEOUT = timedelta(seconds=10)
DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,3})?|mps(:0)?")
REMEDY = "start several processes with torchrun, or unset WORLD_SIZE"


@contextmanager
def process_group(report: Callable[[str], None]) -> Iterator[bool]:
    """Join the process group; yields whether this is the process that prints and writes (rank 0).

    `report` is called with one line if joining takes long.
    """
    rank, world_size = environment_rank_and_size()
    if world_size == 1:
        yield True
        return
    _join(rank, world_size, report)
    try:
        yield dist.get_rank() == 0
        with suppress(RuntimeError):  # another process has failed, and reports its own error
            dist.barrier()  # leave together: a process that exits early can abort the communication of the others
    except UserError:
        is_first_to_report()  # register now: once this process is gone, the waiting processes report errors as well
        raise
    finally:
        dist.destroy_process_group()


def environment_rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE of the environment, as torchrun sets them; (0, 1) if WORLD_SIZE is not set."""
    world_size = _environment_number("WORLD_SIZE", 1)
    if world_size < 2:
        return 0, 1
    rank = _environment_number("RANK", 0)
    if rank >= world_size:
        raise UserError(f"RANK {rank} must be from 0 to {world_size - 1}, since WORLD_SIZE is {world_size}; {REMEDY}")
    return rank, world_size


def _environment_number(name: str, minimum: int) -> int:
    value = os.environ.get(name)
    if value is None and name == "WORLD_SIZE":
        return 1
    if value is None:
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {name} is not set; {REMEDY}")
    if not value.isdecimal() or len(value) > 9 or int(value) < minimum:
        raise UserError(f"the environment variable {name} {value!r} must be a whole number from {minimum}; {REMEDY}")
    return int(value)


def _join(rank: int, world_size: int, report: Callable[[str], None]) -> None:
    """Initialize the process group; a process that waits long for the others reports it."""
    host, port = os.environ.get("MASTER_ADDR"), _environment_number("MASTER_PORT", 1)
    if host is None:
        raise UserError(f"WORLD_SIZE is {world_size} and MASTER_ADDR is not set; {REMEDY}")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError, OverflowError):
        raise UserError(f"MASTER_ADDR {host!r} and MASTER_PORT {port} are not an address; {REMEDY}") from None
    message = f"adlm: process {rank} is waiting for all {world_size} processes at {host}:{port} ({REMEDY})"
    timer = threading.Timer(STORE_TIMEOUT.total_seconds(), report, [message])
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the {world_size} processes cannot connect to each other at {host}:{port} ({reason}); {REMEDY}"
        ) from None
    finally:
        timer.cancel()


@functools.cache
def is_first_to_report() -> bool:
    """Whether this is the first process with a user error; True as well if the store cannot be reached."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)  # type: ignore[attr-defined]
        return bool(store.add(f"adlm-user-errors-{attempt}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def local_device(name: str) -> torch.device:
    """The device of this process: `cuda` without an index is the GPU of LOCAL_RANK. Sets the current CUDA device."""
    device = device_of(name)
    if "LOCAL_RANK" in os.environ and str(device) == "cuda":
        device = device_of(f"cuda:{_environment_number('LOCAL_RANK', 0)}")
    if str(device).startswith("cuda:"):
        torch.cuda.set_device(device)
    return device


def device_of(name: str | torch.device) -> torch.device:
    """An available torch device: cpu, cuda, cuda:N or mps; `auto` is a GPU if there is one. UserError otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not DEVICE_NAME.fullmatch(str(name)):
            raise ValueError
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError):
        raise UserError(f"device {str(name)!r:.60} is not one that torch sees here; try cpu") from None
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
            reason = str(error).partition("\n")[0]
            raise UserError(f"another process stopped before it finished its part of the work ({reason})") from None
    return [item for process_items in gathered for item in process_items]
