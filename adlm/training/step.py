"""One optimizer step over micro-batches. Independent of the method, the data source and the rank.

Nothing here synchronizes with the GPU: the results of a step are returned as tensors on the device.

Shapes: B sequences, L tokens. `pad` is True at padding.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.errors import UserError
from adlm.methods.inputs import check_clean
from adlm.methods.method import Method
from adlm.training.ema import EMA


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass through the network at once, on the CPU if possible: checking them there needs no GPU sync."""

    x: Tensor
    """(B, L), clean ids."""
    pad: Tensor | None = None
    """(B, L), True at padding."""
    batch_slice: BatchSlice | None = None
    """Which rows of the global batch these are; None draws noise for these rows alone, continuing the generator."""


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


def count_tokens(method: Method, batches: Sequence[MicroBatch]) -> int:
    """The number of predicted tokens: the nats per token of these batches are means over them."""
    return sum(int(method.predicted(batch.x, batch.pad).sum()) for batch in batches)


def train_step(
    method: Method,
    network: nn.Module,
    optimizer: AdamW,
    ema: EMA | None,
    batches: Sequence[MicroBatch],
    num_tokens: float,
    progress: float,
    generator: torch.Generator,
    autocast_dtype: torch.dtype | None = None,
    mean_over_processes: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> StepReport:
    """Sum loss and gradient over the micro-batches, divide once by `num_tokens`, clip, apply AdamW, update the EMA.

    `num_tokens` is `count_tokens` of the whole step. Where gradients are averaged over P processes, as FSDP2 does, it
    is 1/P of the tokens of all processes. `autocast_dtype` None computes in the dtype of the weights. The learning rate
    is the one set in the optimizer's parameter groups. `mean_over_processes` averages the loss sums of all processes,
    so that they all report the same values and agree on whether these are finite.
    """
    if not 0 <= progress <= 1:
        raise UserError(f"progress {progress} must be from 0 to 1: the share of training completed")
    optimizer.zero_grad(set_to_none=True)
    device = next(network.parameters()).device
    sums: dict[str, Tensor] = {}
    start = generator.get_state()
    for number, batch in enumerate(batches, 1):
        if batch.batch_slice is not None:
            generator.set_state(start)  # every micro-batch draws the noise of the global batch and uses its own rows
        if isinstance(network, FSDPModule):
            network.set_requires_all_reduce(number == len(batches))
        check_clean(method.config, batch.x, batch.pad)
        x, pad = _to_device(batch.x, device), None if batch.pad is None else _to_device(batch.pad, device)
        with _autocast(device, autocast_dtype), fast_attention(device):
            loss = method.loss(network, x, pad, progress, BatchRng(generator, batch.batch_slice))
        (loss.total / num_tokens).backward()  # type: ignore[no-untyped-call]
        values = {"total": loss.total.detach(), "nats": loss.nats.sum(), **loss.parts}
        sums = {name: sums[name] + value if sums else value for name, value in values.items()}
    sums = dict(zip(sums, mean_over_processes(torch.stack(list(sums.values()))).unbind(), strict=True))
    norm = gradient_norm(network)
    finite = torch.isfinite(norm) & torch.isfinite(sums["total"])
    _update(optimizer, norm, finite, method.config.train.clip)
    if ema is not None:
        ema.update(network, finite)
    means = {name: value / num_tokens for name, value in sums.items()}
    return StepReport(means.pop("total"), means.pop("nats"), means, norm, finite)


def gradient_norm(network: nn.Module) -> Tensor:
    """The Euclidean norm of all gradients together, over all shards."""
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _update(optimizer: AdamW, norm: Tensor, finite: Tensor, clip: float) -> None:
    """AdamW on gradients divided by max(1, norm / clip); no update at all if they are not finite.

    Scale and flag are passed to the fused kernel as tensors, through the two attributes that torch's GradScaler uses:
    no extra pass over the gradients, and no synchronization with the device.
    """
    scale = (norm / clip).clamp(min=1) if clip > 0 else torch.ones_like(norm)
    optimizer.grad_scale, optimizer.found_inf = scale.float(), (~finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, through pinned memory so that the copy is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _autocast(device: torch.device, autocast_dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if autocast_dtype is None else torch.autocast(device.type, autocast_dtype)


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
