"""The moving average of a network's weights, which is what is kept and shared. Knows nothing of how they move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class EMA:
    """a <- d a + (1 - d) w after each update, with d = min(ceiling, (1 + n) / (10 + n)) at the n-th, n from 1.

    A step that was skipped because its loss or gradient was not finite is no update: neither a nor n changes.
    As published, the first average keeps 2/11 of what the weights began as. In the weights' own precision and, where
    these are sharded (DTensor), in their shards. A ceiling of 0 keeps no average: it is the weights.
    """

    def __init__(self, network: nn.Module, ceiling: float):
        self.ceiling = ceiling
        self.weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        self.num_updates = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)

    @torch.no_grad()
    def update(self, network: nn.Module, finite: Tensor | bool = True) -> None:
        """`finite` says whether the optimiser took the step. It stays on the device, as does the count of updates."""
        self.num_updates += finite
        decay = ((1 + self.num_updates.double()) / (10 + self.num_updates)).clamp(max=self.ceiling)
        averaged, weights = (
            [_local(weight) for weight in each] for each in (self.weights.values(), network.parameters())
        )
        share = ((1 - decay) * finite).to(averaged[0].dtype)
        torch._foreach_lerp_(averaged, weights, [share] * len(weights))

    @contextmanager
    def in_place_of_weights(self, network: nn.Module) -> Iterator[None]:
        """Inside, the network has the averaged weights; outside, its own, to the bit."""
        self._exchange(network)
        try:
            yield
        finally:
            self._exchange(network)

    @torch.no_grad()
    def _exchange(self, network: nn.Module) -> None:
        for name, weight in network.named_parameters():
            own = weight.clone()
            weight.copy_(self.weights[name])
            self.weights[name].copy_(own)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "weights": dict(self.weights)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["weights"].keys() == self.weights.keys()
        self.num_updates.copy_(state["num_updates"])
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])


def _local(weight: Tensor) -> Tensor:
    """This process's shard where the weight is sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
