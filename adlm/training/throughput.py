"""Throughput of a run: tokens per second, peak memory, and MFU from a count of floating-point operations.

These depend on the machine, so repeating or resuming a run does not reproduce them. Shapes: B sequences, L tokens.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from adlm.config.schema import Config
from adlm.diffusion.times import BatchRng
from adlm.methods.inputs import vocabulary_of
from adlm.methods.method import Method
from adlm.training.metrics import Counters
from adlm.training.seeds import generator_of

DATASHEET_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, by part of the device name
ROWS = 8  # enough that their antithetic times mask about half of the tokens


def flops_per_token(method: Method, network: Any, device: torch.device) -> float | None:
    """FLOPs per token of a training step's matrix products and attention; None if the device's peak is unknown.

    Call before compiling and sharding the network: torch cannot count the operations of compiled code.
    """
    if datasheet_flops(device) is None:
        return None
    x = zipf(method.config, ROWS, generator_of(0, "noise")).to(device)

    def step() -> None:
        method.loss(network, x, None, 1.0, BatchRng(generator_of(0, "noise"))).total.backward()  # type: ignore[no-untyped-call]

    flops = count_flops(step)
    network.zero_grad(set_to_none=True)
    return flops / int(method.predicted(x, None).sum())


def datasheet_flops(device: torch.device) -> float | None:
    """The datasheet's peak dense bf16 FLOP/s; None for unlisted devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in DATASHEET_FLOPS.items() if part in name), None)


def zipf(config: Config, batch: int, generator: torch.Generator) -> Tensor:
    """Random clean ids (B, L), P(k-th symbol) proportional to 1/k: tokens repeat, so that some of them are anchors."""
    vocabulary = vocabulary_of(config)
    weights = 1 / torch.arange(1, vocabulary.size)  # all symbols but the mask
    rank = torch.multinomial(weights.expand(batch, -1), config.length, replacement=True, generator=generator)
    return rank + (rank >= vocabulary.mask_id)


def count_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products and attention of a step."""

    def addmm_flops(bias: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * int(a[0]) * int(a[1]) * int(b[1])  # torch's own formula does not accept addmm with a dtype

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: addmm_flops}) as counter:
        step()
    return int(counter.get_total_flops())


class ThroughputMeter:
    """Rates since the last `start`."""

    def __init__(self, counters: Counters, device: torch.device, flops_per_token: float | None, num_devices: int):
        self.device, self.flops_per_token, self.num_devices = device, flops_per_token, num_devices
        self.start(counters)

    def start(self, counters: Counters) -> None:
        """Start timing here; time before it, such as validation, is excluded."""
        self.seconds, self.step, self.tokens = time.monotonic(), counters.step, counters.tokens

    def read(self, counters: Counters) -> dict[str, float | None]:
        """Metrics since the last start, over all processes."""
        steps, seconds = counters.step - self.step, time.monotonic() - self.seconds
        if not steps:
            return {}
        rate = (counters.tokens - self.tokens) / max(seconds, 1e-9)
        timings = {"seconds_per_step": seconds / steps, "tokens_per_second": rate}
        peak = datasheet_flops(self.device)
        if peak is not None and self.flops_per_token is not None:
            timings["mfu"] = rate * self.flops_per_token / (peak * self.num_devices)
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:  # peak of the process, in bytes on macOS and kilobytes elsewhere
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {**timings, "memory_gib": memory / 2**30}
