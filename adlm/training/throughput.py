"""Throughput of a run: tokens per second, memory, and MFU from a count of floating-point operations.

All of it depends on the machine and the hour, so a resumed run does not reproduce it.
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
from adlm.methods.inputs import vocabulary_of
from adlm.methods.method import Method
from adlm.training.metrics import Counters
from adlm.training.rng import generator_of

DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, by part of the device name
ROWS = 8  # enough that their antithetic times hide about half of the tokens


def flops_per_token(method: Method, network: Any, device: torch.device) -> float | None:
    """Matrix products and attention of a training step, a token, counted by torch; None where no share is known.

    The network must not be compiled or spread yet: then nobody could count.
    """
    if datasheet_flops(device) is None:
        return None
    x = zipf(method.config, ROWS, generator_of(0, "noise")).to(device)

    def step() -> None:
        method.loss(network, x, None, 1.0, generator_of(0, "noise")).total.backward()  # type: ignore[no-untyped-call]

    flop = count_flops(step)
    network.zero_grad(set_to_none=True)
    return flop / int(method.predicted(x, None).sum())


def datasheet_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second by the maker's figure, for GPUs that we know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in DATASHEET.items() if part in name), None)


def zipf(config: Config, batch: int, generator: torch.Generator) -> Tensor:
    """Clean ids (B, L), the k-th with a chance in proportion to 1/k: tokens repeat, and so anchors are some of them."""
    vocabulary = vocabulary_of(config)
    chances = 1 / torch.arange(1, vocabulary.size)  # one fewer than there are symbols
    rank = torch.multinomial(chances.expand(batch, -1), config.length, replacement=True, generator=generator)
    return rank + (rank >= vocabulary.mask_id)


def count_flops(step: Callable[[], object]) -> int:
    """Operations of a step's matrix products and attention."""

    def into_total(total: Any, a: Any, b: Any, *rest: Any, **others: Any) -> int:
        return 2 * int(a[0]) * int(a[1]) * int(b[1])  # torch's own formula does not know an addmm with a dtype

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: into_total}) as counter:
        step()
    return int(counter.get_total_flops())


class ThroughputMeter:
    """Rates between two readings."""

    def __init__(self, counters: Counters, device: torch.device, flop_a_token: float | None, num_devices: int):
        self.device, self.flop_a_token, self.num_devices = device, flop_a_token, num_devices
        self.start(counters)

    def start(self, counters: Counters) -> None:
        """From here on; what lies before, a validation say, does not count."""
        self.seconds, self.step, self.tokens = time.monotonic(), counters.step, counters.tokens

    def read(self, counters: Counters) -> dict[str, float | None]:
        """Since the last start, over all processes."""
        steps, seconds = counters.step - self.step, time.monotonic() - self.seconds
        if not steps:
            return {}
        rate = (counters.tokens - self.tokens) / max(seconds, 1e-9)
        clocks = {"seconds_per_step": seconds / steps, "tokens_per_second": rate}
        peak = datasheet_flops(self.device)
        if peak is not None and self.flop_a_token is not None:
            clocks["mfu"] = rate * self.flop_a_token / (peak * self.num_devices)
        return {**clocks, "memory_gib": _memory(self.device) / 2**30}


def _memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the GPU, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # the one counts bytes, the others kilobytes
