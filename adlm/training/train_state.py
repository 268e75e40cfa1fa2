"""TrainState: a method's network, sharded over the processes, with its optimizer and EMA. No data, steps or files."""

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
from adlm.training.sharding import Processes, gather_tensor, recompute_blocks, reshard, shard_network
from adlm.training.throughput import flops_per_token


@dataclass(frozen=True)
class TrainState:
    method: Method
    network: Any
    optimizer: AdamW
    ema: EMA | None
    """None where `train.ema` is 0: then the model consists of the weights themselves."""
    autocast_dtype: torch.dtype | None
    """None computes in the dtype of the weights."""
    flops_per_token: float | None = None
    """Floating-point operations of training, for the MFU; None where the device's peak rate is unknown."""

    @contextmanager
    def with_ema(self) -> Iterator[None]:
        """Inside, the network has the EMA weights and runs under training's autocast, for validation and sampling."""
        device = next(self.network.parameters()).device
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.autocast_dtype is not None:
            autocast = torch.autocast(device.type, self.autocast_dtype)
        ema_weights = nullcontext() if self.ema is None else self.ema.in_place_of_weights(self.network)
        with ema_weights:
            try:
                with autocast:
                    yield
            finally:
                reshard(self.network)

    def model_weights(self) -> dict[str, Tensor]:
        """The EMA weights, unsharded and on the CPU. A collective call: every process must make it."""
        weights = self.network.named_parameters() if self.ema is None else self.ema.weights.items()
        return {name: gather_tensor(weight) for name, weight in weights}


def build_train_state(
    config: Config, processes: Processes, report: Callable[[str], None], log_frequencies: Tensor | None = None
) -> TrainState:
    """A new network, initialized identically on every process and for any number of them, then sharded.

    The output heads start at `log_frequencies` (V,), if given.
    """
    train, method = config.train, method_of(config)
    torch.manual_seed(seed_of(train.seed, "weights"))
    network = method.build()
    if log_frequencies is not None:
        start_from_unigram(network, log_frequencies)
    network = network.to(processes.device)
    if train.precision == "float64":
        network = network.double()
    flops = flops_per_token(method, network, processes.device)
    if train.recompute:
        recompute_blocks(network)
    compiled = train.compile == "on" or (train.compile == "auto" and processes.device.type == "cuda")
    if compiled and (problem := compile_trunks(network)):
        report(problem)
    shard_network(network, processes)
    ema = EMA(network, train.ema) if train.ema > 0 else None
    autocast_dtype = _autocast_dtype(train, processes.device)
    return TrainState(method, network.train(), build_optimizer(network, train), ema, autocast_dtype, flops)


def _autocast_dtype(train: Train, device: torch.device) -> torch.dtype | None:
    precision = train.precision
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and device.type == "cuda") else None
