"""The samplers that run on a denoiser. `adlm/registry.py` lists them by name.

Causal networks sample with left_to_right.py; D3PM and SEDD's analytic update sample with reference.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from adlm.config.schema import Sampling
from adlm.diffusion.schedules import NoiseSchedule
from adlm.diffusion.times import grid
from adlm.registry import SAMPLERS
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Frame, SamplingRun
from adlm.sampling.ordered import anchor_first, confidence, entropy, leftmost, margin, sample_ordered
from adlm.sampling.remdm_conf import sample_remdm_conf
from adlm.sampling.steps import (
    Steps,
    StepsFunction,
    ancestral_steps,
    cap_steps,
    corrector_steps,
    forward_backward_steps,
    loop_steps,
    rescale_steps,
)
from adlm.sampling.windows import sample_semi_autoregressive


@dataclass(frozen=True)
class Sampler:
    """A sampling algorithm."""

    sample: Callable[[SamplingRun], Iterator[Frame]]
    """From the canvas to text; the first Frame is the canvas."""
    steps: StepsFunction = ancestral_steps
    """The probabilities of revealing and remasking in `SamplingRun.steps`."""
    anchored: bool = False
    """Whether it needs an anchor network."""
    long_texts: bool = False
    """Whether it fills canvases longer than the model."""
    remasks: bool = True
    """Whether a token may change after it is revealed; otherwise text can be shown as it appears."""


def sampler_of(sampling: Sampling) -> Sampler:
    return SAMPLERS[sampling.sampler]  # type: ignore[no-any-return]


def steps_of(schedule: NoiseSchedule, sampling: Sampling) -> Steps:
    """The steps of the sampler that `sampling` names."""
    return sampler_of(sampling).steps(schedule, grid(sampling.steps, sampling.t_end), sampling)


def sample_analytic(run: SamplingRun) -> Iterator[Frame]:
    """SEDD's analytic update with scores derived from beliefs: the ancestral step, with a draw at the end.

    Such scores have exactly the sum that makes the two steps equal.
    """
    return sample_positions_first(replace(run, sampling=replace(run.sampling, final="draw")))


ANCESTRAL = Sampler(sample_positions_first, remasks=False)
REMDM_CAP = Sampler(sample_positions_first, cap_steps)
REMDM_RESCALE = Sampler(sample_positions_first, rescale_steps)
REMDM_CONF = Sampler(sample_remdm_conf)
REMDM_LOOP = Sampler(sample_positions_first, loop_steps)
FORWARD_BACKWARD = Sampler(sample_positions_first, forward_backward_steps)
DFM = Sampler(sample_positions_first, corrector_steps)
ANALYTIC = Sampler(sample_analytic, remasks=False)
SEMI_AUTOREGRESSIVE = Sampler(sample_semi_autoregressive, long_texts=True, remasks=False)
LEFT_TO_RIGHT = Sampler(partial(sample_ordered, by_position=leftmost), remasks=False)
CONFIDENCE = Sampler(partial(sample_ordered, by_beliefs=confidence), remasks=False)
MARGIN = Sampler(partial(sample_ordered, by_beliefs=margin), remasks=False)
ENTROPY = Sampler(partial(sample_ordered, by_beliefs=entropy), remasks=False)
THRESHOLD = Sampler(partial(sample_ordered, by_beliefs=confidence, threshold=True), remasks=False)
ANCHOR_FIRST = Sampler(partial(sample_ordered, by_position=anchor_first), anchored=True, remasks=False)
