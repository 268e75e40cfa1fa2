"""Processes, devices and the sharding of weights (FSDP2), and the default number of CPU threads. No losses, no files.

torchrun starts the processes; they form a mesh of `replicate` rows and `shard` columns. The processes of a row hold
different shards of the weights, those of a column hold the same shard. A single process, without torchrun, takes the
same code path without a mesh and without communication.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recomputed_in_backward

from adlm.config.schema import Train
from adlm.distributed import GROUP_TIMEOUT
from adlm.errors import UserError
from adlm.models.transformer import Trunk

SINGLE_PROCESS = "unset RANK, WORLD_SIZE and LOCAL_RANK to train in one process"
FORWARD_METHODS = ("score", "nats_at_positions")  # methods of a network, besides forward, that use its weights

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

    def broadcast(self, value: Any) -> Any:
        """The value that rank 0 passes, on every process."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def main_process_first(self, function: Callable[[], Any]) -> Any:
        """The result of `function`, which rank 0 calls before the others do, however long it takes.

        A UserError on rank 0 is raised on every process.
        """
        if self.mesh is None:
            return function()
        group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        problem: list[str | None] = [None]
        result = None
        if self.is_main_process:
            try:
                result = function()
            except UserError as error:
                problem[0] = str(error)
        dist.broadcast_object_list(problem, src=0, group=group, device=torch.device("cpu"))
        if problem[0] is not None:
            raise UserError(problem[0])
        return result if self.is_main_process else function()


@contextmanager
def training_processes(train: Train) -> Iterator[Processes]:
    """Join the processes that torchrun started and build their mesh; a single process without torchrun."""
    under_torchrun = _started_by_torchrun()
    device = _device(train.device)
    if not under_torchrun:
        mesh_shape(train, 1)
        yield Processes(0, 1, device, None)
        return
    try:
        store, rank, num_ranks = next(rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the other processes cannot be reached ({str(error).partition(chr(10))[0]}): the environment has RANK and "
            f"WORLD_SIZE; start the command with torchrun, or {SINGLE_PROCESS}"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # keys of an earlier attempt stay in the store
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    attempt_store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=attempt_store, rank=rank, world_size=num_ranks)
    try:
        shape = mesh_shape(train, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")) if num_ranks > 1 else None
        yield Processes(rank, num_ranks, device, mesh)
    finally:
        dist.destroy_process_group()


def _started_by_torchrun() -> bool:
    """Whether torchrun's environment variables are set; UserError if they are inconsistent."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise UserError(f"{name}={value} in the environment is not a number; {SINGLE_PROCESS}")
        numbers[name] = int(value)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise UserError(
            f"RANK={numbers['RANK']} in the environment does not fit WORLD_SIZE={numbers['WORLD_SIZE']}; "
            f"{SINGLE_PROCESS}"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"the environment has RANK and WORLD_SIZE, but no {name}; start the command with torchrun, or "
                f"{SINGLE_PROCESS}"
            )
    return True


def mesh_shape(train: Train, num_ranks: int) -> tuple[int, int]:
    """(replicate, shard) of the config; without train.replicate, as many replicas as there are processes for."""
    replicate = max(1, num_ranks // train.shard) if train.replicate is None else train.replicate
    if replicate * train.shard != num_ranks:
        options = f"train.shard {train.shard}"
        if train.replicate is not None:
            options = f"train.replicate {train.replicate} x {options}"
        noun = "process" if num_ranks == 1 else "processes"
        raise UserError(
            f"{options} does not fit {num_ranks} {noun}: the product must be the number of processes of torchrun; "
            f"try {' or '.join(f'train.shard={n}' for n in sorted({num_ranks, 1}, reverse=True))}, and leave "
            "train.replicate empty"
        )
    return replicate, train.shard


def micro_batches(train: Train, num_ranks: int) -> tuple[int, int]:
    """(number of micro-batches per process and step, rows in each)."""
    size = train.micro_batch or max(1, train.batch_size // num_ranks)
    if train.batch_size % (num_ranks * size):
        multiple = num_ranks * size
        nearest = max(1, round(train.batch_size / multiple)) * multiple
        processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
        raise UserError(
            f"train.batch_size {train.batch_size} is not a multiple of {processes} x {size} sequences; "
            f"try train.batch_size={nearest}"
        )
    return train.batch_size // (num_ranks * size), size


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("train.device cuda is not available: torch sees no CUDA device; try train.device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if _started_by_torchrun() else 0)
    if device.index >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK {device.index} has no GPU: this machine has {torch.cuda.device_count()}; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(device)
    return device


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


def recompute_blocks(network: nn.Module) -> None:
    """Each block stores its input only and is recomputed in the backward pass."""
    for block in blocks_of(network):
        block.forward = _with_recomputation(block.forward)


def _with_recomputation(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recomputing_forward(*args: Any) -> Tensor:
        return recomputed_in_backward(forward, *args, use_reentrant=False)  # type: ignore[no-any-return]

    return recomputing_forward


def shard_network(network: nn.Module, processes: Processes) -> None:
    """Shard and replicate the weights over the mesh: each block is one FSDP group, all other weights another.

    FSDP gathers a group in `forward`, and in the `FORWARD_METHODS` registered here.
    """
    mesh = processes.mesh
    if mesh is None:
        return
    sharded = mesh["shard"].size() > 1
    for block in blocks_of(network):
        fully_shard(block, mesh=mesh, reshard_after_forward=sharded)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    for name in FORWARD_METHODS:
        if hasattr(network, name):
            register_fsdp_forward_method(network, name)


def reshard(network: nn.Module) -> None:
    """Free gathered weights after a forward pass without a backward pass, so that the parameters are shards again."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks_of(network: nn.Module) -> list[nn.Module]:
    return [block for trunk in network.modules() if isinstance(trunk, Trunk) for block in trunk.blocks]


def gather_tensor(tensor: Tensor) -> Tensor:
    """The unsharded weight, on the CPU. A collective call: every process must make it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
