"""How fast a run goes and how much memory it takes. Knows nothing of what it does.

All of it depends on the machine and the hour: these are the numbers that a resumed run does not repeat.
"""

import resource
import sys
import time

import torch

from adlm.training.counters import Counters
from adlm.training.work import datasheet_flops


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
