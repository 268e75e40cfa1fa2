"""The samplers that run on a denoiser, by name.

Causal networks sample with left_to_right.py; D3PM and SEDD's analytic update sample with reference.py.
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
        rng: RowRng,
        pad: Tensor | None = None,
    ) -> Iterator[Frame]:
        """From the canvas (B, L), mask ids where text is wanted, to text; the first Frame is the canvas."""
        ...


def sample_analytic(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    rng: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """SEDD's analytic update with scores derived from beliefs: the ancestral step, with a draw at the end.

    Such scores have exactly the sum that makes the two steps equal.
    """
    return sample_positions_first(denoiser, canvas, mask_id, steps, replace(sampling, final="draw"), rng, pad)


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
