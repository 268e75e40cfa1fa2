"""The memory and the time of a training run, counted from its config: no data, no weights and no GPU are needed.

Parameters and matrix products are counted on the meta device. The tensors that live between forward and backward pass
follow from the code of the blocks, and their sum was compared with measured peaks (`figures.MEASUREMENTS`). Times are
those measured on one H200, scaled by the datasheets of the GPUs: an extrapolation.

Shapes: T tokens in a micro-batch, d wide, V symbols.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from adlm.apps.plan.figures import (
    EAGER_BYTES,
    EAGER_TIME,
    HOST_SECONDS,
    HOST_SECONDS_FSDP,
    LARGEST_MFU,
    MEASUREMENTS,
    OTHER_BYTES,
    PRODUCTS,
    UPDATE_BYTES,
    USABLE,
    Measurement,
)
from adlm.checkpoints.adapter import add_lora_of
from adlm.config.load import resolve
from adlm.config.schema import Config, Model
from adlm.methods import method_of
from adlm.methods.inputs import vocabulary_of
from adlm.methods.method import Method
from adlm.models.heads import MAX_LOGITS
from adlm.models.lora import trained_parameters
from adlm.models.transformer import num_parameters, on_meta
from adlm.tokens import with_vocabulary
from adlm.training.gpus import GPUS, Gpu
from adlm.training.metrics import places_per_token, scored_shares, training_flops
from adlm.training.optimizer import is_matrix
from adlm.training.sharding import blocks_of, mesh_shape
from adlm.training.step import micro_batch_shape

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What a run needs. Memory is that of one GPU, at the moment of a step when it is largest."""

    parameters: int
    trained: int
    """Parameters that are not frozen."""
    micro_batch: int
    """Sequences that a GPU processes at once."""
    micro_batches: int
    """Of a GPU and step."""
    gib: dict[str, float]
    """Memory by part."""
    usable_gib: float
    tflop_per_step: float
    """Of all GPUs: matrix products and attention, without recomputation."""
    mfu: float
    """Share of the datasheets' FLOP/s."""
    tokens_per_second: float
    waits_for_host: bool
    """Whether a micro-batch is so small that the host is slower than the GPU."""
    days: float
    """Of `train.steps` steps."""
    days_at_measured_mfu: float
    """If the MFU is not above the largest one measured."""

    @property
    def total_gib(self) -> float:
        return sum(self.gib.values())

    @property
    def fits(self) -> bool:
        return self.total_gib <= self.usable_gib


@dataclass(frozen=True)
class Machines:
    """The GPUs that are planned for."""

    gpu: Gpu
    num: int
    efficiency: float
    """The share of the speed that is left where several GPUs work together: an assumption."""


def plan(config: Config, machines: Machines, network: nn.Module | None = None) -> Plan:
    """`network` is that of the config, if it was built on meta before."""
    train, method, gpu, num_gpus = config.train, method_of(config), machines.gpu, machines.num
    mesh_shape(train, num_gpus)
    micro_batches, rows = micro_batch_shape(train, num_gpus)
    network = on_meta(lambda: _network(method)) if network is None else network
    tokens, is_parallel = rows * config.length, num_gpus > 1
    flops = training_flops(method, network)
    trained = sum(weight.numel() for weight in trained_parameters(network).values())
    busy, host = (micro_batches * seconds for seconds in _seconds(method, network, tokens, gpu, is_parallel))
    busy += UPDATE_BYTES * trained / train.shard / (gpu.bandwidth * 1e12)
    seconds = max(busy, host) / (machines.efficiency if is_parallel else 1)
    step_tokens = train.batch_size * config.length
    mfu = flops * step_tokens / (seconds * num_gpus * gpu.tflops * 1e12)
    days = train.steps * seconds / 86_400
    return Plan(
        parameters=num_parameters(network),
        trained=trained,
        micro_batch=rows,
        micro_batches=micro_batches,
        gib={name: size / GIB for name, size in _memory(method, network, tokens, micro_batches, is_parallel).items()},
        usable_gib=USABLE * gpu.memory_gib,
        tflop_per_step=flops * step_tokens / 1e12,
        mfu=mfu,
        tokens_per_second=step_tokens / seconds,
        days=days,
        waits_for_host=host > busy,
        days_at_measured_mfu=days * max(1.0, mfu / LARGEST_MFU),
    )


def _network(method: Method) -> nn.Module:
    network = method.build()
    if method.config.train.lora_rank:
        add_lora_of(network, method.config)
    return network


def _memory(method: Method, network: nn.Module, tokens: int, micro_batches: int, is_parallel: bool) -> dict[str, float]:
    """Bytes by part: at the beginning of the last backward pass of a step, or in the update if that takes more.

    Gradients exist in the backward pass if an earlier micro-batch left some; otherwise they take the place of
    activations, which are larger or, in a small batch, freed by the time of the update.
    """
    config, blocks = method.config, blocks_of(network)
    train, model = config.train, config.model
    full, low = {"float64": (8, 8), "float32": (4, 4)}.get(train.precision, (4, 2))
    size, trained = num_parameters(network), trained_parameters(network)
    num_trained = sum(weight.numel() for weight in trained.values())
    of_blocks = [num_parameters(block) for block in blocks]
    rest = size - sum(of_blocks)

    muon: dict[torch.Size, int] = {}  # elements of all matrices of a shape, which are updated together
    if train.optimizer == "muon":
        for name, weight in trained.items():
            if ".blocks." in name and is_matrix(name, weight):
                muon[weight.shape] = muon.get(weight.shape, 0) + weight.numel()
    states = {
        "weights": full * size / train.shard,
        "optimizer": full * (2 * num_trained - sum(muon.values())) / train.shard,
        "EMA": full * num_trained / train.shard if train.ema else 0,
    }
    gradients = full * num_trained / train.shard

    # In the update: several stacked copies of the matrices of one shape, unsharded
    update = {"gradients": gradients, "workspace": 6 * full * max(muon.values(), default=0)}

    # FSDP gathers blocks one by one and prefetches the next; what is in no block stays, and all weights do if each GPU
    # has them. Autocast's copies of the weights live until the backward pass.
    gathered, copied = 0, size
    if is_parallel:
        gathered = size if train.shard == 1 else rest + 2 * max(of_blocks, default=0)
    if train.recompute:
        copied = rest + max(of_blocks, default=0)
    workspace = full * gathered + (low * copied if low < full else 0)

    shares = scored_shares(method)
    places = tokens * places_per_token(config)
    a_block = places * block_bytes(model, full, low) * (1 if train.compile != "off" else EAGER_BYTES)
    saved = len(blocks) * a_block
    if train.recompute:  # the inputs of all blocks, and all of one
        saved = len(blocks) * places * full * model.hidden + a_block
    # Around each head: the states that it reads, before and after the norm, and their gradients
    saved += places * full * model.hidden * (5 + 2.5 * (len(shares) - 1))
    head = vocabulary_of(config).size * model.hidden
    chunk = min(tokens * max(shares), MAX_LOGITS * 4 / low / vocabulary_of(config).size)
    logits = chunk * vocabulary_of(config).size * low + low * head + full * head * len(shares)
    backward = {
        "gradients": gradients if micro_batches > 1 else 0,
        "activations": saved,
        "logits": logits,
        "workspace": workspace,
    }
    return states | max(update, backward, key=lambda parts: sum(parts.values()))


def block_bytes(model: Model, full: int, low: int) -> int:
    """Bytes per token that a compiled block keeps for its backward pass, as the partitioner of torch.compile chooses.

    In full precision its input. In the precision of the products what they read: normed states (twice), queries, keys,
    values and the attention's output, the inner states of the MLP; and what was projected to the residual stream first.
    The values of the published block are a view of the product that also holds unrotated queries and keys. Llama's
    attention output is kept in two layouts. Then dropout's masks, the logarithms of attention's sums, and statistics of
    norms.
    """
    attention = {"published": 6, "llama": 5, "gpt2": 4}[model.family]
    inner = 3 if model.family == "llama" else 2
    masks = 2 * model.hidden if model.dropout else 0
    products = (2 + attention + 1) * model.hidden + inner * model.mlp_width
    return full * model.hidden + low * products + masks + 4 * model.heads + 16


def _seconds(method: Method, network: nn.Module, tokens: int, gpu: Gpu, is_parallel: bool) -> tuple[float, float]:
    """Of a micro-batch: of the kernels, limited by FLOP/s or by memory, and of the host, which launches them."""
    config, num_blocks = method.config, len(blocks_of(network))
    flops = tokens * training_flops(method, network, config.train.recompute)
    moved = OTHER_BYTES * tokens * places_per_token(config) * num_blocks * config.model.hidden
    busy = flops / (PRODUCTS * gpu.tflops * 1e12) + moved / (gpu.bandwidth * 1e12)
    slower = EAGER_TIME if config.train.compile == "off" else 1
    return slower * busy, num_blocks * (HOST_SECONDS_FSDP if is_parallel else HOST_SECONDS)


def suggestion(config: Config, machines: Machines) -> tuple[dict[str, int], Plan] | None:
    """The options of `train` with which a run fits: of those that fit the fastest, and of these the least sharded."""
    method = method_of(config)
    network, found = on_meta(lambda: _network(method)), []
    for changes in _changes(config, machines.num):
        planned = plan(replace(config, train=replace(config.train, **changes)), machines, network)  # type: ignore[arg-type]
        if planned.fits:
            found.append((changes, planned))
    return max(found, key=lambda each: each[1].tokens_per_second, default=None)


def _changes(config: Config, num_gpus: int) -> Iterator[dict[str, int]]:
    """Smaller micro-batches, recomputation, and more shards: of 8 GPUs, a machine, or of all."""
    train = config.train
    num, rows = micro_batch_shape(train, num_gpus)
    shards = [shard for shard in (8, num_gpus) if shard > train.shard and num_gpus % shard == 0]
    sizes = [size for size in (2**power for power in reversed(range(rows.bit_length()))) if num * rows % size == 0]
    for shard in (train.shard, *shards):
        for recompute in sorted({train.recompute, True}):
            for size in dict.fromkeys((rows, *sizes)):
                changed = {"micro_batch": size, "recompute": recompute, "shard": shard}
                yield {name: value for name, value in changed.items() if value != getattr(train, name)}


@dataclass(frozen=True)
class PlanCheck:
    """A plan compared with what was measured on one H200."""

    measurement: Measurement
    gib: float
    tokens_per_second: float

    @property
    def memory_error(self) -> float:
        return self.gib / self.measurement.gib - 1

    @property
    def speed_error(self) -> float | None:
        measured = self.measurement.tokens_per_second
        return None if measured is None else self.tokens_per_second / measured - 1


def checks() -> list[PlanCheck]:
    """The plan of every measurement."""
    found, machines = [], Machines(GPUS["h200"], 1, 1.0)
    for measurement in MEASUREMENTS:
        planned = plan(with_vocabulary(resolve(measurement.words.split())), machines)
        found.append(PlanCheck(measurement, planned.total_gib, planned.tokens_per_second))
    return found
