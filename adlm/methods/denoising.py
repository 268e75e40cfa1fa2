"""A masked diffusion network as samplers ask it, and the walk that a Config's sampling names.

Padding is never seen here: a row walks as it would alone.

Shapes: B sequences, L tokens, N places, V symbols. `pad` is True at padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.data.rows.packing import row_frame, text_width
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates
from adlm.methods import masked_diffusion as diffusion
from adlm.methods.inputs import check_canvas, eval_mode, vocabulary_of
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import SAMPLERS
from adlm.sampling.steps import steps_of
from adlm.sampling.windows import framed, sample_windows


def generate(
    config: Config,
    network: nn.Module | FrozenNetwork,
    canvas: Tensor,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """A walk by SUBS beliefs, any sampler's."""
    check_canvas(config, canvas, sampling, pad)
    if sampling.sampler == "anchor-first" and not has_anchors(network):
        raise UserError(
            f"sampling.sampler anchor-first asks an anchor network, and {config.method} has none; try confidence"
        )
    denoiser, mask_id = as_denoiser(config, network), vocabulary_of(config).mask_id
    steps, sampler = steps_of(diffusion.schedule_of(config), sampling), SAMPLERS[sampling.sampler]

    def walk(part: Tensor, its_pad: Tensor | None = None) -> Iterator[Frame]:
        return sampler(denoiser, part, mask_id, steps, sampling, draws, its_pad)

    if sampling.sampler == "semi-autoregressive":
        window, stride = window_and_stride(config, sampling)
        if canvas.shape[1] > config.length:
            between = framed(walk, *row_frame(vocabulary_of(config)))
            return sample_windows(between, canvas, mask_id, window, stride)
    return walk(canvas, pad)


def window_and_stride(config: Config, sampling: Sampling) -> tuple[int, int]:
    """How many tokens of a longer text a window holds, which is a row without bos and eos, and by how many it moves."""
    window = text_width(vocabulary_of(config), config.length)
    stride = sampling.stride or max(1, config.length // 2)
    if stride > window:
        raise UserError(f"sampling.stride {stride} would skip tokens: a window holds {window}; lower it")
    return window, stride


@dataclass(frozen=True)
class FrozenOutput:
    """What a network whose weights rest says of one state: each head runs where it is asked."""

    network: FrozenNetwork
    hidden: HiddenStates
    mask_id: int

    def log_beliefs(self, places: Tensor) -> Tensor:
        return clean_log_beliefs(self.network.logits(self.hidden.last.flatten(0, 1)[places]), self.mask_id)

    def anchor_log_beliefs(self, places: Tensor) -> Tensor:
        assert self.hidden.anchor is not None
        return clean_log_beliefs(self.network.anchor_logits(self.hidden.anchor.flatten(0, 1)[places]), self.mask_id)


@dataclass(frozen=True)
class NetworkOutput:
    """What a network in training says, sharded perhaps: all of its logits, by the one call it is wrapped for."""

    network: nn.Module
    z: Tensor
    sigma: Tensor | None
    pad: Tensor | None
    mask_id: int

    @torch.no_grad()
    def log_beliefs(self, places: Tensor) -> Tensor:
        with eval_mode(self.network):
            return clean_log_beliefs(self.network(self.z, self.sigma, self.pad).flatten(0, 1)[places], self.mask_id)

    @torch.no_grad()
    def anchor_log_beliefs(self, places: Tensor) -> Tensor:
        with eval_mode(self.network):
            logits = self.network.anchor_logits(self.z, self.sigma, self.pad)  # type: ignore[operator]
            return clean_log_beliefs(logits.flatten(0, 1)[places], self.mask_id)


def has_anchors(network: nn.Module | FrozenNetwork) -> bool:
    return network.anchored if isinstance(network, FrozenNetwork) else hasattr(network, "anchor_logits")


def as_denoiser(config: Config, network: nn.Module | FrozenNetwork) -> Denoiser:
    """The network as samplers ask it."""
    mask_id = vocabulary_of(config).mask_id

    def read(z: Tensor, alpha: Tensor | None, pad: Tensor | None) -> DenoiserOutput:
        sigma = diffusion.conditioning_sigma_of(config, z, alpha, pad)
        if isinstance(network, FrozenNetwork):
            return FrozenOutput(network, network.hidden(z, sigma, pad), mask_id)
        return NetworkOutput(network, z, sigma, pad, mask_id)

    return read


def logits_everywhere(
    config: Config, network: nn.Module | FrozenNetwork, pad: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """(z, alpha) -> logits (B, L, V), for walks by the full posterior; dropout off and no gradient."""

    @torch.no_grad()
    def logits(z: Tensor, alpha: Tensor) -> Tensor:
        sigma = diffusion.conditioning_sigma_of(config, z, alpha, pad)
        if isinstance(network, FrozenNetwork):
            return network.logits(network.hidden(z, sigma, pad).last.flatten(0, 1)).view(*z.shape, -1)
        with eval_mode(network):
            return network(z, sigma, pad)  # type: ignore[no-any-return]

    return logits
