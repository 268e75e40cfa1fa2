"""The moving average of a network's weights, which is what is kept and shared. Knows nothing of how they move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Average:
    """a <- d a + (1 - d) w after each update, with d = min(ceiling, (1 + n) / (10 + n)) at the n-th, n from 1.

    As published: the first average keeps 2/11 of what the weights began as. In the weights' own precision and, where
    these are sharded (DTensor), in their shards. A ceiling of 0 keeps no average: it is the weights.
    """

    def __init__(self, network: nn.Module, ceiling: float):
        self.ceiling, self.num_updates = ceiling, 0
        self.weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        self.num_updates += 1
        decay = min(self.ceiling, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(list(self.weights.values()), list(network.parameters()), 1 - decay)

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
        self.num_updates = int(state["num_updates"])
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
