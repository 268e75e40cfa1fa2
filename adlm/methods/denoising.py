"""A masked diffusion network as a denoiser: the interface that samplers call.

Networks ignore padding here, so a row is sampled as it would be alone.

Shapes: B sequences, L tokens, N positions, V symbols. `pad` is True at padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.inference.frozen import FrozenNetwork, HiddenStates
from adlm.methods.inputs import eval_mode
from adlm.sampling.frame import Denoiser, DenoiserOutput


@dataclass(frozen=True)
class FrozenOutput:
    """The output of a frozen network for one state: each head runs only at the requested positions."""

    network: FrozenNetwork
    hidden: HiddenStates
    mask_id: int

    def log_beliefs(self, positions: Tensor) -> Tensor:
        return clean_log_beliefs(self.network.logits(self.hidden.last.flatten(0, 1)[positions]), self.mask_id)

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        assert self.hidden.anchor is not None
        return clean_log_beliefs(self.network.anchor_logits(self.hidden.anchor.flatten(0, 1)[positions]), self.mask_id)


@dataclass(frozen=True)
class NetworkOutput:
    """The output of a network in training: a sharded one can only be called as a whole, so all logits are computed."""

    network: nn.Module
    z: Tensor
    sigma: Tensor | None
    pad: Tensor | None
    mask_id: int

    @torch.no_grad()
    def log_beliefs(self, positions: Tensor) -> Tensor:
        with eval_mode(self.network):
            logits = self.network(self.z, self.sigma, self.pad)
            return clean_log_beliefs(logits.flatten(0, 1)[positions], self.mask_id)

    @torch.no_grad()
    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        with eval_mode(self.network):
            logits = self.network.anchor_logits(self.z, self.sigma, self.pad)  # type: ignore[operator]
            return clean_log_beliefs(logits.flatten(0, 1)[positions], self.mask_id)


SigmaFunction = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]
"""(z (B, L), alpha (B,) or None, pad) -> sigma (B,) of a time-conditioned network, else None."""


def as_denoiser(network: nn.Module | FrozenNetwork, mask_id: int, sigma_of: SigmaFunction) -> Denoiser:
    """The network as a function from noisy ids to beliefs."""

    def denoise(z: Tensor, alpha: Tensor | None, pad: Tensor | None) -> DenoiserOutput:
        sigma = sigma_of(z, alpha, pad)
        if isinstance(network, FrozenNetwork):
            return FrozenOutput(network, network.hidden(z, sigma, pad), mask_id)
        return NetworkOutput(network, z, sigma, pad, mask_id)

    return denoise


def logits_everywhere(
    network: nn.Module | FrozenNetwork, sigma_of: SigmaFunction, pad: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """(z, alpha) -> logits (B, L, V), for reference sampling; dropout off and no gradient."""

    @torch.no_grad()
    def logits(z: Tensor, alpha: Tensor) -> Tensor:
        sigma = sigma_of(z, alpha, pad)
        if isinstance(network, FrozenNetwork):
            return network.logits(network.hidden(z, sigma, pad).last.flatten(0, 1)).view(*z.shape, -1)
        with eval_mode(network):
            return network(z, sigma, pad)  # type: ignore[no-any-return]

    return logits
