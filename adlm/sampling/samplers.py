"""Every sampler over a denoiser, by name. Knows which walk each of them is.

Left to right, a causal network walks by itself (left_to_right.py); scores of SEDD and beliefs of D3PM that the mask may
have a part in walk by the full posterior (plain.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Denoiser, Frame
from adlm.sampling.ordered import sample_ordered
from adlm.sampling.remdm_conf import sample_remdm_conf
from adlm.sampling.rng import RowRng
from adlm.sampling.steps import Steps


class Sampler(Protocol):
    def __call__(
        self,
        denoiser: Denoiser,
        canvas: Tensor,
        mask_id: int,
        steps: Steps,
        sampling: Sampling,
        draws: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        """A walk from the canvas (B, L), mask ids where text is wanted, to text."""
        ...


def sample_analytic(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """SEDD's score update. Scores made of beliefs sum to what they should: the update is the ancestral step, and ends
    with a draw."""
    return sample_positions_first(denoiser, canvas, mask_id, steps, replace(sampling, final="draw"), draws, pad)


SAMPLERS: dict[str, Sampler] = {
    "ancestral": sample_positions_first,
    "remdm-cap": sample_positions_first,
    "remdm-rescale": sample_positions_first,
    "remdm-conf": sample_remdm_conf,
    "remdm-loop": sample_positions_first,
    "forward-backward": sample_positions_first,
    "dfm": sample_positions_first,
    "analytic": sample_analytic,
    "semi-autoregressive": sample_positions_first,
    "left-to-right": sample_ordered,
    "confidence": sample_ordered,
    "margin": sample_ordered,
    "entropy": sample_ordered,
    "threshold": sample_ordered,
    "anchor-first": sample_ordered,
}
