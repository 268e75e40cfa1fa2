"""One optimiser step over micro-batches. Knows no method's name, no data source and no rank.

Nothing here waits for a GPU: what a step has to say comes back as tensors, and whoever reads them waits.

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

from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.methods.inputs import check_clean, check_once
from adlm.methods.method import Method
from adlm.training.ema import EMA


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the network at once, still on the host where it can be: looking at it there is free."""

    x: Tensor
    """(B, L), clean ids."""
    pad: Tensor | None = None
    """(B, L), True at padding."""
    portion: BatchSlice | None = None
    """Which rows of the step's whole batch these are; empty draws for them alone, after what was drawn before."""


@dataclass(frozen=True)
class StepReport:
    """What a step says of itself, a token, of all processes' batches. On the device until it is read."""

    total: Tensor
    """What was differentiated."""
    nats: Tensor
    """The estimate of the bound, without the anchor term."""
    parts: dict[str, Tensor]
    """The terms of `total` by name."""
    norm: Tensor
    """Of the gradient, before it was clipped."""
    finite: Tensor
    """Whether loss and gradient were finite. If not, weights, moments and EMA are as they were."""

    def check(self) -> None:
        """Raises where the loss or the gradient was not finite. This waits for the device."""
        if not self.finite:
            raise UserError(
                f"the loss is {float(self.total):.4g} and the norm of its gradient {float(self.norm):.4g}; the weights "
                "were left as they were before this step. Try a lower train.learning_rate or a longer "
                "train.warm_up_steps"
            )


def count_tokens(method: Method, batches: Sequence[MicroBatch]) -> int:
    """How many tokens the nats of these batches are of."""
    return sum(int(method.predicted(batch.x, batch.pad).sum()) for batch in batches)


def train_step(
    method: Method,
    network: nn.Module,
    optimizer: AdamW,
    average: EMA | None,
    batches: Sequence[MicroBatch],
    num_tokens: float,
    progress: float,
    generator: torch.Generator,
    lowered: torch.dtype | None = None,
    over_processes: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> StepReport:
    """Loss and gradient of all micro-batches, summed and divided once by `num_tokens`; clip; AdamW; average.

    `num_tokens` is that of `count_tokens` over the whole step. Where gradients are averaged over P processes, as FSDP2
    does, it is 1/P of all processes' tokens. `lowered` is autocast's precision; empty runs in the weights' own. The
    learning rate is whatever the optimizer's groups hold. `over_processes` is the mean over them of what each has
    summed, so that all report the same and agree on whether it is finite.
    """
    optimizer.zero_grad(set_to_none=True)
    device = next(network.parameters()).device
    sums: dict[str, Tensor] = {}
    start = generator.get_state()
    for number, batch in enumerate(batches, 1):
        if batch.portion is not None:
            generator.set_state(start)  # every part draws for the whole batch, and keeps its rows
        if isinstance(network, FSDPModule):
            network.set_requires_all_reduce(number == len(batches))
        check_clean(method.config, batch.x, batch.pad)
        x, pad = _moved(batch.x, device), None if batch.pad is None else _moved(batch.pad, device)
        with _precision(device, lowered), fast_attention(device), check_once():
            loss = method.loss(network, x, pad, progress, generator, batch.portion)
        (loss.total / num_tokens).backward()  # type: ignore[no-untyped-call]
        told = {"total": loss.total.detach(), "nats": loss.nats.sum(), **loss.parts}
        sums = {name: sums[name] + value if sums else value for name, value in told.items()}
    sums = dict(zip(sums, over_processes(torch.stack(list(sums.values()))).unbind(), strict=True))
    norm = gradient_norm(network)
    finite = torch.isfinite(norm) & torch.isfinite(sums["total"])
    _update(optimizer, norm, finite, method.config.train.clip)
    if average is not None:
        average.update(network, finite)
    means = {name: value / num_tokens for name, value in sums.items()}
    return StepReport(means.pop("total"), means.pop("nats"), means, norm, finite)


def gradient_norm(network: nn.Module) -> Tensor:
    """The Euclidean norm of all gradients together, over all shards where they are sharded."""
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _update(optimizer: AdamW, norm: Tensor, finite: Tensor, clip: float) -> None:
    """AdamW on gradients divided by max(1, norm / clip), and nothing at all where they are not finite.

    Both go into the fused kernel as tensors, by the two attributes with which torch's own GradScaler speaks to it: no
    pass over the gradients, and no word from the device.
    """
    too_long = (norm / clip).clamp(min=1) if clip > 0 else torch.ones_like(norm)
    optimizer.grad_scale, optimizer.found_inf = too_long.float(), (~finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; by way of pinned memory, so that the copy does not wait for the work before it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _precision(device: torch.device, lowered: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if lowered is None else torch.autocast(device.type, lowered)


@contextmanager
def fast_attention(device: torch.device) -> Iterator[None]:
    """Inside, attention prefers cuDNN on Hopper: forth and back it took a third less time than torch's first choice."""
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
