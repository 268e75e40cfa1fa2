"""Exponential moving average (EMA) of a network's weights. Independent of the optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class EMA:
    """a <- d a + (1 - d) w after the n-th update, n = 1, 2, ..., with d = min(max_decay, (1 + n) / (10 + n)).

    As in the published code, the first update keeps 2/11 of the initial weights. Steps that were skipped because their
    loss or gradient was not finite change neither a nor n. The average has the dtype and the sharding (DTensor) of the
    weights. With max_decay 0 it equals the weights.
    """

    def __init__(self, network: nn.Module, max_decay: float):
        self.max_decay = max_decay
        self.weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        self.num_updates = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)

    @torch.no_grad()
    def update(self, network: nn.Module, finite: Tensor | bool = True) -> None:
        """`finite` is whether the optimizer step was applied. Nothing here synchronizes with the device."""
        self.num_updates += finite
        decay = ((1 + self.num_updates.double()) / (10 + self.num_updates)).clamp(max=self.max_decay)
        averages = [_local(weight) for weight in self.weights.values()]
        weights = [_local(weight) for weight in network.parameters()]
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
        for name, weight in network.named_parameters():
            own = weight.clone()
            weight.copy_(self.weights[name])
            self.weights[name].copy_(own)


def _local(weight: Tensor) -> Tensor:
    """This process's shard of a sharded weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
