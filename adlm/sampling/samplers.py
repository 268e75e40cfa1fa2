"""Every sampler over a denoiser, by name. Knows which walk each of them is.

Left to right, a causal network walks by itself (left_to_right.py); scores of SEDD and beliefs of D3PM that the mask may
have a part in walk by the full posterior (plain.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.denoiser import Denoiser
from adlm.sampling.frame import Frame
from adlm.sampling.ordered import ordered_walk
from adlm.sampling.positions_first import walk
from adlm.sampling.remdm_conf import confident_walk
from adlm.sampling.rng import RowDraws
from adlm.sampling.steps import Steps


class Sampler(Protocol):
    def __call__(
        self,
        denoiser: Denoiser,
        canvas: Tensor,
        mask_id: int,
        steps: Steps,
        sampling: Sampling,
        draws: RowDraws,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        """A walk from the canvas (B, L), mask ids where text is wanted, to text."""
        ...


def analytic_walk(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowDraws,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """SEDD's score update. Scores made of beliefs sum to what they should: the update is the ancestral step, and ends
    with a draw."""
    return walk(denoiser, canvas, mask_id, steps, replace(sampling, final="draw"), draws, pad)


SAMPLERS: dict[str, Sampler] = {
    "ancestral": walk,
    "remdm-cap": walk,
    "remdm-rescale": walk,
    "remdm-conf": confident_walk,
    "remdm-loop": walk,
    "forward-backward": walk,
    "dfm": walk,
    "analytic": analytic_walk,
    "semi-autoregressive": walk,
    "left-to-right": ordered_walk,
    "confidence": ordered_walk,
    "margin": ordered_walk,
    "entropy": ordered_walk,
    "threshold": ordered_walk,
    "anchor-first": ordered_walk,
}
