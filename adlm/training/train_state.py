"""What is trained: a method's network, spread over the processes, with its optimiser and its averaged weights.

Knows nothing of text, steps or files.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from adlm.config.schema import Config, Train
from adlm.methods import method_of
from adlm.methods.method import Method
from adlm.models.heads import start_from_unigram
from adlm.training.compilation import compile_trunks
from adlm.training.ema import EMA
from adlm.training.optimizer import build_optimizer
from adlm.training.rng import seed_of
from adlm.training.sharding import Processes, gather_tensor, keep_gathered, recompute_blocks, shard_network
from adlm.training.throughput import flops_per_token


@dataclass(frozen=True)
class TrainState:
    method: Method
    network: Any
    optimizer: AdamW
    average: EMA | None
    """Empty where `train.ema` is 0: then the weights themselves are what is kept."""
    lowered: torch.dtype | None
    """The precision of autocast; empty runs in the weights' own."""
    flop_a_token: float | None = None
    """Arithmetic of training, where a share of the device's can be told."""

    @contextmanager
    def with_ema(self) -> Iterator[None]:
        """Inside, the network has the weights that are kept, to be measured and asked, in training's precision."""
        device = next(self.network.parameters()).device
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.lowered is not None:
            autocast = torch.autocast(device.type, self.lowered)
        averaged = nullcontext() if self.average is None else self.average.in_place_of_weights(self.network)
        with averaged:
            try:
                with autocast:
                    yield
            finally:
                keep_gathered(self.network)

    def model_weights(self) -> dict[str, Tensor]:
        """The weights that are kept, whole and on the host. Every process must ask."""
        weights = self.network.named_parameters() if self.average is None else self.average.weights.items()
        return {name: gather_tensor(weight) for name, weight in weights}


def build(
    config: Config, processes: Processes, say: Callable[[str], None], log_frequencies: Tensor | None = None
) -> TrainState:
    """A fresh network, the same on every process and for any number of them, then spread over them.

    Its heads begin at `log_frequencies` (V,), where they are given.
    """
    train, method = config.train, method_of(config)
    torch.manual_seed(seed_of(train.seed, "weights"))
    network = method.build()
    if log_frequencies is not None:
        start_from_unigram(network, log_frequencies)
    network = network.to(processes.device)
    if train.precision == "float64":
        network = network.double()
    flop = flops_per_token(method, network, processes.device)
    if train.recompute:
        recompute_blocks(network)
    compiled = train.compile == "on" or (train.compile == "auto" and processes.device.type == "cuda")
    if compiled and (problem := compile_trunks(network)):
        say(problem)
    shard_network(network, processes)
    average = EMA(network, train.ema) if train.ema > 0 else None
    lowered = _lowered(train, processes.device)
    return TrainState(method, network.train(), build_optimizer(network, train), average, lowered, flop)


def _lowered(train: Train, device: torch.device) -> torch.dtype | None:
    wanted = train.precision
    return torch.bfloat16 if wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda") else None
