"""One training step and what it changes: loss and gradient over micro-batches, the optimizer's update, the EMA.

Independent of the method, the data source and the rank. Nothing here synchronizes with the GPU: the results of a step
are returned as tensors on the device.

Every random number of a run is derived from (seed, purpose, step). No RNG state is carried from step to step, so a
resumed run draws the same numbers as an uninterrupted one. Noise is drawn for the global batch of a step; a
`BatchSlice` selects the rows of a micro-batch, on any number of processes.

Shapes: B sequences, L tokens. `pad` is True at padding.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from adlm.config.schema import Config, Train
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.errors import UserError
from adlm.methods.inputs import check_clean, given_option
from adlm.methods.method import Loss
from adlm.models.lora import trained_parameters
from adlm.training.optimizer import build_optimizer, new_moments, update_weights
from adlm.training.sharding import local_shard, reshard

Purpose = Literal["weights", "order", "noise", "dropout", "validation", "samples"]
STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: seeds of neighbouring steps are far apart, and all differ


class EMA:
    """a <- d a + (1 - d) w after the n-th update, n = 1, 2, ..., with d = min(max_decay, (1 + n) / (10 + n)).

    As in the published code, the first update keeps 2/11 of the initial weights. Steps that were skipped because their
    loss or gradient was not finite change neither a nor n. The average has the dtype and the sharding (DTensor) of the
    weights. With max_decay 0 it equals the weights. Frozen weights have none.
    """

    def __init__(self, network: nn.Module, max_decay: float):
        self.max_decay = max_decay
        self.weights = {name: weight.detach().clone() for name, weight in trained_parameters(network).items()}
        self.num_updates = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)

    @torch.no_grad()
    def update(self, network: nn.Module, finite: Tensor | bool = True) -> None:
        """`finite` is whether the optimizer step was applied. Nothing here synchronizes with the device."""
        self.num_updates += finite
        decay = ((1 + self.num_updates.double()) / (10 + self.num_updates)).clamp(max=self.max_decay)
        averages = [local_shard(weight) for weight in self.weights.values()]
        weights = [local_shard(weight) for weight in trained_parameters(network).values()]
        share = ((1 - decay) * finite).to(averages[0].dtype)
        torch._foreach_lerp_(averages, weights, [share] * len(weights))

    @contextmanager
    def in_place_of_weights(self, network: nn.Module) -> Iterator[None]:
        """Inside, the network has the averaged weights; on exit its own are restored exactly."""
        self._swap(network)
        try:
            yield
        finally:
            self._swap(network)

    @torch.no_grad()
    def _swap(self, network: nn.Module) -> None:
        for name, weight in trained_parameters(network).items():
            own = weight.clone()
            weight.copy_(self.weights[name])
            self.weights[name].copy_(own)


class Objective(Protocol):
    """What a step needs of a method: see `methods.method.Method`."""

    @property
    def config(self) -> Config: ...

    @property
    def exact(self) -> bool: ...

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor: ...

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
    ) -> Loss: ...


@dataclass(frozen=True)
class TrainState:
    """What a step changes, and how it computes."""

    method: Objective
    network: Any
    optimizer: AdamW
    ema: EMA | None
    """None where `train.ema` is 0: then the model consists of the weights themselves."""
    autocast_dtype: torch.dtype | None = None
    """None computes in the dtype of the weights."""
    flops_per_token: float | None = None
    """Floating-point operations of training, for the MFU; None where the device's peak rate is unknown."""
    max_length: int | None = None
    """Of the rows; None is the length of the model."""

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast_dtype is None else torch.autocast(self.device.type, self.autocast_dtype)

    @contextmanager
    def with_ema(self) -> Iterator[None]:
        """Inside, the network has the EMA weights and runs under training's autocast, for validation and sampling."""
        with nullcontext() if self.ema is None else self.ema.in_place_of_weights(self.network):
            try:
                with self.autocast():
                    yield
            finally:
                reshard(self.network)

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors to save or to load into, by name; creates the optimizer's if there are none yet.

        Frozen weights are not among them: a run with LoRA reads them from its base again.
        """
        tensors = {}
        for name, weight in trained_parameters(self.network).items():
            if weight not in self.optimizer.state:
                self.optimizer.state[weight] = new_moments(self.optimizer, weight)
            tensors[f"weights.{name}"] = weight.detach()
            tensors |= {f"optimizer.{name}.{kind}": value for kind, value in self.optimizer.state[weight].items()}
        ema_weights = {} if self.ema is None else self.ema.weights
        return tensors | {f"ema.{name}": weight for name, weight in ema_weights.items()}

    def model_weights(self) -> Mapping[str, Tensor]:
        """What RUN/model holds: the EMA of the trained weights, if there is one. Each process has its shards."""
        return trained_parameters(self.network) if self.ema is None else self.ema.weights


def new_train_state(
    method: Objective,
    network: Any,
    autocast_dtype: torch.dtype | None = None,
    flops_per_token: float | None = None,
    max_length: int | None = None,
) -> TrainState:
    """The state before the first step, with the optimizer and the EMA of the config."""
    train = method.config.train
    ema = EMA(network, train.ema) if train.ema > 0 else None
    optimizer = build_optimizer(network, train)
    return TrainState(method, network, optimizer, ema, autocast_dtype, flops_per_token, max_length)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass through the network at once, on the CPU if possible: checking them there needs no GPU sync."""

    x: Tensor
    """(B, L), clean ids."""
    pad: Tensor | None = None
    """(B, L), True at padding."""
    batch_slice: BatchSlice | None = None
    """Which rows of the global batch these are; None draws noise for these rows alone, continuing the generator."""
    given: Tensor | None = None
    """(B, L), True at tokens that are never masked and have no loss, such as prompts."""
    labels: Tensor | None = None
    """(B, L), True at the anchors of methods that read labels."""


@dataclass(frozen=True)
class StepReport:
    """Loss and gradient of a step: means per token over all processes, on the device."""

    total: Tensor
    """The loss that was differentiated."""
    nats: Tensor
    """The estimate of the bound, without the anchor term."""
    parts: dict[str, Tensor]
    """The terms of `total` by name."""
    gradient_norm: Tensor
    """Before clipping."""
    finite: Tensor
    """Whether loss and gradient were finite. If not, the step left weights, moments and EMA unchanged."""

    def check(self) -> None:
        """Raise UserError if the loss or the gradient was not finite. Synchronizes with the device."""
        if not self.finite:
            raise UserError(
                f"the loss is {float(self.total):.4g} and its gradient norm {float(self.gradient_norm):.4g}; this step "
                "did not change the weights. Try a lower train.learning_rate or a longer train.warm_up_steps"
            )


def micro_batch_shape(train: Train, num_ranks: int) -> tuple[int, int]:
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


def count_tokens(method: Objective, batches: Sequence[MicroBatch]) -> int:
    """The number of predicted tokens: the nats per token of these batches are means over them."""
    return sum(int(method.predicted(batch.x, batch.pad, **given_option(batch.given)).sum()) for batch in batches)


def train_step(
    state: TrainState,
    batches: Sequence[MicroBatch],
    num_tokens: float,
    progress: float,
    generator: torch.Generator,
    mean_over_processes: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> StepReport:
    """Sum loss and gradient over the micro-batches, divide once by `num_tokens`, update weights and EMA.

    `num_tokens` is `count_tokens` of the whole step. Where gradients are averaged over P processes, as FSDP2 does, it
    is 1/P of the tokens of all processes. The learning rate is the one set in the optimizer's parameter groups.
    `mean_over_processes` averages the loss sums of all processes, so that they all report the same values and agree on
    whether these are finite.
    """
    if not 0 <= progress <= 1:
        raise UserError(f"progress {progress} must be from 0 to 1: the share of training completed")
    method, network, device = state.method, state.network, state.device
    state.optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    start = generator.get_state()
    for number, batch in enumerate(batches, 1):
        if batch.batch_slice is not None:
            generator.set_state(start)  # every micro-batch draws the noise of the global batch and uses its own rows
        if isinstance(network, FSDPModule):
            network.set_requires_all_reduce(number == len(batches))
        check_clean(method.config, batch.x, batch.pad, max_length=state.max_length)
        x = _to_device(batch.x, device)
        pad, given, labels = (
            None if each is None else _to_device(each, device) for each in (batch.pad, batch.given, batch.labels)
        )
        with fast_attention(device):  # around the backward pass too, where blocks may be recomputed
            with state.autocast():
                rng = BatchRng(generator, batch.batch_slice)
                loss = method.loss(network, x, pad, progress, rng, **given_option(given, labels))
            (loss.total / num_tokens).backward()  # type: ignore[no-untyped-call]
        values = {"total": loss.total.detach(), "nats": loss.nats.sum(), **loss.parts}
        sums = {name: sums[name] + value if sums else value for name, value in values.items()}
    sums = dict(zip(sums, mean_over_processes(torch.stack(list(sums.values()))).unbind(), strict=True))
    norm = gradient_norm(network)
    finite = torch.isfinite(norm) & torch.isfinite(sums["total"])
    update_weights(state.optimizer, norm, finite, method.config.train.clip)
    if state.ema is not None:
        state.ema.update(network, finite)
    means = {name: value / num_tokens for name, value in sums.items()}
    return StepReport(means.pop("total"), means.pop("nats"), means, norm, finite)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, through pinned memory so that the copy is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def fast_attention(device: torch.device) -> Iterator[None]:
    """Prefer cuDNN attention on Hopper: forward and backward take a third less time than in torch's default order."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


def gradient_norm(network: nn.Module) -> Tensor:
    """The Euclidean norm of all gradients together, over all shards."""
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def seed_of(seed: int, purpose: Purpose, number: int = 0) -> int:
    """The seed of one step. Seeds of one purpose differ in their lower 32 bits, all that torch's CPU generator uses."""
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + number * STRIDE) % 2**63


def generator_of(seed: int, purpose: Purpose, number: int = 0) -> torch.Generator:
    """A CPU generator, so that the numbers are the same for every device."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, number))


def reseed_dropout(seed: int, step: int, rank: int, num_ranks: int) -> None:
    """Seed torch's default generators, which dropout uses; each process has its own masks."""
    torch.manual_seed(seed_of(seed, "dropout", step * num_ranks + rank))
