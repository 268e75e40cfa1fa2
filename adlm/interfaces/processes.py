"""The processes that torchrun started, or this one alone: who speaks, and who has which device. Knows no command."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from adlm.errors import UserError
from adlm.language_model import device_of

PATIENCE = timedelta(days=1)  # what one waits for another's share: not all are equally fast
ANSWER = timedelta(seconds=10)  # what the store takes at most


@contextmanager
def processes() -> Iterator[bool]:
    """Joins the others; whether this process speaks and writes for all."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield dist.get_rank() == 0
        with suppress(RuntimeError):  # another process has failed, and says why itself
            dist.barrier()  # all leave together: one that goes while another still talks to it can abort
    except UserError:
        first_to_tell()  # now: those who wait for this process learn that it is gone, and would be first
        raise
    finally:
        dist.destroy_process_group()


@functools.cache
def first_to_tell() -> bool:
    """Whether no other process found a mistake before this one. Where they cannot be asked, each tells its own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=ANSWER)  # type: ignore[attr-defined]
        return bool(store.add(f"adlm-mistakes-{attempt}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def own_device(name: str) -> torch.device:
    """The device by this name; of several GPUs, this process's, and the one that is meant where none is named."""
    wanted = device_of(name)
    if "LOCAL_RANK" in os.environ and str(wanted) == "cuda":
        wanted = device_of(f"cuda:{os.environ['LOCAL_RANK']}")
    if str(wanted).startswith("cuda:"):
        torch.cuda.set_device(wanted)
    return wanted
