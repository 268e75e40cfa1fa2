"""Processes and devices: who is there, who holds which part of the weights. Knows nothing of losses, steps or files.

Processes are started by torchrun, and stand on a mesh of `replicate` rows and `shard` columns: those of a row split the
weights among them, those of a column hold the same part. One process alone, without torchrun, is a mesh of one: it
takes the same way, and there is nothing to exchange.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from adlm.config.schema import Train
from adlm.errors import UserError
from adlm.models.transformer import Trunk

ALONE = "unset RANK, WORLD_SIZE and LOCAL_RANK to train in one process"
PATIENCE = timedelta(days=1)  # what the others wait while the first process prepares the data
CALLED = ("score", "nats_at_positions")  # what methods call of a network, beside the network itself

MOST_THREADS = torch.get_num_threads()  # before any run lowers it: one for each physical core


@dataclass(frozen=True)
class Processes:
    """This process among the others."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh | None
    """Empty for one process alone."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of each number, the sum over all processes. On the host, so that no GPU is waited for."""
        if self.mesh is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers)
        return [float(number) for number in numbers]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, as gradients are averaged; where the tensor lives, and waiting for nothing."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor / self.num_ranks

    def same(self, value: Any) -> Any:
        """What the first process has, plain data only, for all of them."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def after_the_first(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, called by the first process before the others, however long it takes there.

        A mistake that it finds is told by all.
        """
        if self.mesh is None:
            return make()
        waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
        problem: list[str | None] = [None]
        made = None
        if self.first:
            try:
                made = make()
            except UserError as error:
                problem[0] = str(error)
        dist.broadcast_object_list(problem, src=0, group=waiting, device=torch.device("cpu"))
        if problem[0] is not None:
            raise UserError(problem[0])
        return made if self.first else make()


@contextmanager
def training_processes(train: Train) -> Iterator[Processes]:
    """The processes that torchrun started, on their mesh, or this one alone; on leaving they part."""
    started = _started_by_torchrun()
    device = _device(train.device)
    if not started:
        mesh_shape(train, 1)
        yield Processes(0, 1, device, None)
        return
    try:
        store, rank, num_ranks = next(rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the other processes cannot be reached ({str(error).partition(chr(10))[0]}): the environment has RANK and "
            f"WORLD_SIZE; start the command by torchrun, or {ALONE}"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun leaves the addresses of the last one behind
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    own = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=num_ranks)
    try:
        shape = mesh_shape(train, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")) if num_ranks > 1 else None
        yield Processes(rank, num_ranks, device, mesh)
    finally:
        dist.destroy_process_group()


def _started_by_torchrun() -> bool:
    """Whether the environment has what torchrun sets; a user error where it has nonsense."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise UserError(f"{name}={value} in the environment is no number; {ALONE}")
        numbers[name] = int(value)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise UserError(
            f"RANK={numbers['RANK']} in the environment does not fit WORLD_SIZE={numbers['WORLD_SIZE']}; {ALONE}"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"the environment has RANK and WORLD_SIZE, but no {name}; start the command by torchrun, or {ALONE}"
            )
    return True


def mesh_shape(train: Train, num_ranks: int) -> tuple[int, int]:
    """(replicate, shard): as the knobs have it; what is left open takes all processes."""
    replicate = max(1, num_ranks // train.shard) if train.replicate is None else train.replicate
    if replicate * train.shard != num_ranks:
        told = f"train.shard {train.shard}"
        if train.replicate is not None:
            told = f"train.replicate {train.replicate} x {told}"
        noun = "process" if num_ranks == 1 else "processes"
        raise UserError(
            f"{told} does not fit {num_ranks} {noun}: their product must be the number that torchrun starts; "
            f"try {' or '.join(f'train.shard={n}' for n in sorted({num_ranks, 1}, reverse=True))}, and leave "
            "train.replicate empty"
        )
    return replicate, train.shard


def micro_batches(train: Train, num_ranks: int) -> tuple[int, int]:
    """(how many, of how many rows): what one process passes through the network in a step."""
    size = train.micro_batch or max(1, train.batch_size // num_ranks)
    if train.batch_size % (num_ranks * size):
        whole = num_ranks * size
        nearest = max(1, round(train.batch_size / whole)) * whole
        processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
        raise UserError(
            f"train.batch_size {train.batch_size} is not a multiple of {processes} x {size} sequences; "
            f"try train.batch_size={nearest}"
        )
    return train.batch_size // (num_ranks * size), size


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("train.device cuda is not here: torch sees no CUDA device; try train.device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if _started_by_torchrun() else 0)
    if device.index >= torch.cuda.device_count():
        raise UserError(
            f"process {device.index} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(device)
    return device


def default_threads() -> int:
    """CPU threads for torch where nobody asks for a number: OMP_NUM_THREADS, or as many as CPUs are idle now.

    More threads than idle CPUs wait for each other at every operation: on two busy cores, 1 thread trained at 3,900
    tokens/s and 2 at 1,700 to 2,700 (quickstart/adlm).
    """
    if "OMP_NUM_THREADS" in os.environ:
        return MOST_THREADS
    return max(1, min(MOST_THREADS, round(idle_cpus())))


def idle_cpus(seconds: float = 0.3) -> float:
    """How many of the CPUs that this process may use are idle for a moment, by /proc/stat; all where there is none."""
    before = _cpu_times()
    if not before:
        return float(os.cpu_count() or 1)
    time.sleep(seconds)
    after = _cpu_times()
    shares = []
    for cpu, (idle, total) in before.items():
        passed = after[cpu][1] - total
        shares.append((after[cpu][0] - idle) / passed if passed else 1.0)
    return sum(shares)


def _cpu_times() -> dict[int, tuple[int, int]]:
    """(idle, total) ticks of every CPU that this process may use; nothing where there is no /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        usable = os.sched_getaffinity(0)
    except (OSError, AttributeError):  # macOS has neither
        return {}
    times: dict[int, tuple[int, int]] = {}
    for name, *ticks in map(str.split, lines):
        if name[:3] == "cpu" and name[3:] and int(name[3:]) in usable:
            user, nice, system, idle, waiting, *others = map(int, ticks[:8])  # what follows is contained in user
            times[int(name[3:])] = idle + waiting, user + nice + system + idle + waiting + sum(others)
    return times


def recompute_blocks(network: nn.Module) -> None:
    """Each block keeps its input only, and is run again when its gradients are formed."""
    for block in blocks_of(network):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recomputed(*values: Any) -> Tensor:
        return checkpoint(forward, *values, use_reentrant=False)  # type: ignore[no-any-return]

    return recomputed


def shard_network(network: nn.Module, processes: Processes) -> None:
    """Split and repeat the weights over the mesh: every block is gathered by itself, the rest as one group.

    Methods read the weights through `CALLED` alone, so those are where a group is gathered.
    """
    mesh = processes.mesh
    if mesh is None:
        return
    sharded = mesh["shard"].size() > 1
    for block in blocks_of(network):
        fully_shard(block, mesh=mesh, reshard_after_forward=sharded)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    for name in CALLED:
        if hasattr(network, name):
            register_fsdp_forward_method(network, name)


def keep_gathered(network: nn.Module) -> None:
    """After a forward pass without a backward one: let go of gathered weights, so that the shards are the weights."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks_of(network: nn.Module) -> list[nn.Module]:
    return [block for trunk in network.modules() if isinstance(trunk, Trunk) for block in trunk.blocks]


def gather_tensor(tensor: Tensor) -> Tensor:
    """All of a weight, on the host; every process must ask."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
