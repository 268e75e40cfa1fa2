"""How much arithmetic a token costs, so that a run can say what share of its GPU it uses. Knows nothing of the run."""

from typing import Any

import torch

from adlm.benchmark.training_speed import DATASHEET, count_flops, zipf
from adlm.methods.method import Method
from adlm.training.rng import generator_of

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
