"""Sharding of the weights over processes (FSDP2), gathering them again, and who saves what. No losses, no files.

The processes that torchrun started form a mesh of `replicate` rows and `shard` columns. The processes of a row hold
different shards of the weights, those of a column hold the same shard. A single process has no mesh and no
communication.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from adlm import distributed
from adlm.checkpoints.tensor_files import FullTensor, TensorRows, file_order, on_cpu
from adlm.config.schema import Train
from adlm.distributed import Processes, local_device, process_group, rank_and_size
from adlm.errors import UserError
from adlm.models.transformer import Trunk

FORWARD_METHODS = ("score", "nats_at_positions", "log_rates", "text_rates", "to_remember")
"""Methods of a network, besides forward, that use its weights."""


@contextmanager
def training_processes(train: Train, report: Callable[[str], None]) -> Iterator[Processes]:
    """Join the processes that torchrun started and build their mesh; a single process without torchrun."""
    device = local_device(train.device, "train.device")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with process_group(report, backend, distributed.TRAINING_TIMEOUT) if "RANK" in os.environ else nullcontext():
        rank, num_ranks = rank_and_size()
        shape = mesh_shape(train, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")) if num_ranks > 1 else None
        yield Processes(rank, num_ranks, device, mesh)


def mesh_shape(train: Train, num_ranks: int) -> tuple[int, int]:
    """(replicate, shard): `train.shard` processes share one replica of the weights."""
    if num_ranks % train.shard:
        noun = "process" if num_ranks == 1 else "processes"
        raise UserError(
            f"train.shard {train.shard} does not fit {num_ranks} {noun}: it must divide the number of processes of "
            f"torchrun; try {' or '.join(f'train.shard={n}' for n in sorted({num_ranks, 1}, reverse=True))}"
        )
    return num_ranks // train.shard, train.shard


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


def gather_to_main(tensors: Mapping[str, Tensor], processes: Processes, write: Callable[[FullTensor], None]) -> None:
    """Gather sharded tensors one by one while `write(full_tensor)` on the main process writes them to a file.

    A collective call: every process must make it. `write` must call `full_tensor` for each tensor, in the order of
    `file_order`. If it raises a UserError, the remaining tensors are gathered before every process raises that error.
    """
    waiting = deque(tensors[name] for name in file_order(tensors))

    def full_tensor(tensor: Tensor) -> Tensor:
        expected = waiting.popleft()
        assert tensor is expected, "processes must gather in one order"
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if processes.is_main_process:
            return on_cpu(full)
        if full.is_cuda:  # one all-gather in flight at a time: queued ones could time out while the main process writes
            torch.cuda.synchronize(full.device)
        return full

    def gather_rest() -> None:
        while waiting:
            full_tensor(waiting[0])

    def write_or_gather() -> None:
        try:
            write(full_tensor)
        except UserError:
            gather_rest()
            raise

    if not processes.is_main_process:
        gather_rest()
    processes.on_main_process(write_or_gather)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> TensorRows:
    """The rows of a tensor that this process holds."""
    if not isinstance(tensor, DTensor):
        return TensorRows(tensor, 0, tensor.shape)
    assert tensor.placements == (Replicate(), Shard(0))
    shard, num_rows = tensor.device_mesh["shard"], len(tensor)
    first = shard.get_local_rank() * math.ceil(num_rows / shard.size())  # as torch.chunk divides them
    return TensorRows(tensor.to_local(), min(first, num_rows), tensor.shape)


def rows_to_save(tensors: Mapping[str, Tensor], processes: Processes) -> dict[str, TensorRows]:
    """Copies on the CPU of the rows that this process saves.

    Replicas divide the rows that each of them holds. So every process copies and writes an equal part.
    """
    rows = {}
    for name, tensor in tensors.items():
        own = own_rows(tensor)
        if isinstance(tensor, DTensor):
            replicate, num = tensor.device_mesh["replicate"], len(own.tensor)
            start, stop = (num * (replicate.get_local_rank() + end) // replicate.size() for end in (0, 1))
            own = TensorRows(own.tensor[start:stop], own.first + start, own.shape)
        if len(own.tensor) if isinstance(tensor, DTensor) else processes.is_main_process:
            rows[name] = replace(own, tensor=own.tensor.detach().to("cpu", copy=True))
    return rows
