"""Process groups and devices: joining the processes that torchrun started, gathering their results, choosing a device.

A single process takes the same path, with rank 0 of 1 and nothing to exchange. Training has its own mesh on top of this
(training/sharding.py).
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

PATIENCE = timedelta(days=1)  # what one waits for another's share: not all are equally fast
ANSWER = timedelta(seconds=10)  # what the store takes at most
DEVICES = re.compile(r"cpu|cuda(:\d{1,3})?|mps(:0)?")
REMEDY = "start several processes with torchrun, or unset WORLD_SIZE"


@contextmanager
def process_group(report: Callable[[str], None]) -> Iterator[bool]:
    """Join the process group; yields whether this is the process that prints and writes (rank 0).

    `report` is called with a line where joining takes long.
    """
    rank, num = rank_and_world_size()
    if num == 1:
        yield True
        return
    _join(rank, num, report)
    try:
        yield dist.get_rank() == 0
        with suppress(RuntimeError):  # another process has failed, and says why itself
            dist.barrier()  # all leave together: one that goes while another still talks to it can abort
    except UserError:
        is_first_to_report()  # now: those who wait for this process learn that it is gone, and would be first
        raise
    finally:
        dist.destroy_process_group()


def rank_and_world_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE of the environment, as torchrun sets them; (0, 1) where there is no WORLD_SIZE."""
    num = _number("WORLD_SIZE", 1)
    if num < 2:
        return 0, 1
    rank = _number("RANK", 0)
    if rank >= num:
        raise UserError(f"RANK {rank} must be from 0 to {num - 1}, since WORLD_SIZE is {num}; {REMEDY}")
    return rank, num


def _number(name: str, least: int) -> int:
    value = os.environ.get(name)
    if value is None and name == "WORLD_SIZE":
        return 1
    if value is None:
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {name} is not set; {REMEDY}")
    if not value.isdecimal() or len(value) > 9 or int(value) < least:
        raise UserError(f"the environment variable {name} {value!r} must be a whole number from {least}; {REMEDY}")
    return int(value)


def _join(rank: int, num: int, report: Callable[[str], None]) -> None:
    """Begin the process group; who waits long for the others says so."""
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", 1)
    if host is None:
        raise UserError(f"WORLD_SIZE is {num} and MASTER_ADDR is not set; {REMEDY}")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError, OverflowError):
        raise UserError(f"MASTER_ADDR {host!r} and MASTER_PORT {port} are no address; {REMEDY}") from None
    waits = threading.Timer(
        ANSWER.total_seconds(), report, [f"adlm: process {rank} waits for all {num} at {host}:{port} ({REMEDY})"]
    )
    waits.daemon = True
    waits.start()
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"the {num} processes do not find each other at {host}:{port} ({why}); {REMEDY}") from None
    finally:
        waits.cancel()


@functools.cache
def is_first_to_report() -> bool:
    """Whether no other process found a mistake before this one. Where they cannot be asked, each tells its own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=ANSWER)  # type: ignore[attr-defined]
        return bool(store.add(f"adlm-mistakes-{attempt}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def local_device(name: str) -> torch.device:
    """The device by this name; of several GPUs, this process's, and the one that is meant where none is named."""
    wanted = device_of(name)
    if "LOCAL_RANK" in os.environ and str(wanted) == "cuda":
        wanted = device_of(f"cuda:{_number('LOCAL_RANK', 0)}")
    if str(wanted).startswith("cuda:"):
        torch.cuda.set_device(wanted)
    return wanted


def device_of(name: str | torch.device) -> torch.device:
    """A device that torch sees here: cpu, cuda, cuda:N or mps; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not DEVICES.fullmatch(str(name)):
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
    """Which process this is, and of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(share: list[Item]) -> list[Item]:
    """The shares of all processes, one after the other."""
    shares: list[list[Item]] = [share]
    if dist.is_initialized():
        shares = [[] for _ in range(dist.get_world_size())]
        try:
            dist.all_gather_object(shares, share)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"another process stopped before its share of the work was done ({reason})") from None
    return [item for each in shares for item in each]
