"""The samplers that run on a denoiser, and windows for texts longer than the model. `adlm/registry.py` names them.

Causal networks sample with left_to_right.py; D3PM and SEDD's analytic update sample with reference.py.

Shapes: B sequences, L tokens, of which a window holds at most `length`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.schedules import NoiseSchedule
from adlm.diffusion.times import grid
from adlm.errors import UserError
from adlm.registry import SAMPLERS
from adlm.sampling.adaptive import (
    anchor_first,
    certainty,
    confidence,
    entropy,
    leftmost,
    margin,
    sample_by_rates,
    sample_ordered,
    sample_remdm_conf,
)
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Denoiser, Ending, Frame, Row, SamplingRun, end_texts, first_frame
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


@dataclass(frozen=True)
class Sampler:
    """A sampling algorithm."""

    sample: Callable[[SamplingRun], Iterator[Frame]]
    """From the canvas to text; the first Frame is the canvas."""
    steps: StepsFunction = ancestral_steps
    """The probabilities of revealing and remasking in `SamplingRun.steps`."""
    anchored: bool = False
    """Whether it needs an anchor network."""
    rated: bool = False
    """Whether it needs a network that predicts rates."""
    long_texts: bool = False
    """Whether it fills canvases longer than the model."""
    block_causal: bool = False
    """Whether it needs a block-causal network, whose method then samples: it is no function of a denoiser."""
    remasks: bool = True
    """Whether a token may change after it is revealed; otherwise text can be shown as it appears."""
    constrained: bool = False
    """Whether it draws tokens in `SamplingRun.holes` as their constraints demand."""


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


OpenBlock = Callable[[Tensor, int, Tensor | None], Denoiser]
"""(ids (B, stop), start of the block, pad) -> the denoiser of the block [start, stop)."""

WindowSampler = Callable[[Tensor], Iterator[Frame]]
"""canvas -> Frames, the first of which is the canvas."""


class WriteText(Protocol):
    def __call__(
        self, canvas: Tensor, ending: Ending | None, pad: Tensor | None, holes: Sequence[ConstrainedHole] = ()
    ) -> Iterator[Frame]:
        """The frames of a canvas, a prompt and then masks in every row; `ending` says where texts end."""
        ...


def window_and_stride(sampling: Sampling, row: Row) -> tuple[int, int]:
    """How many tokens of the text a window holds, and by how many it advances."""
    return row.length - len(row.before) - len(row.after), sampling.stride or max(1, row.length // 2)


def check_stride(sampling: Sampling, row: Row) -> None:
    """A user error if the windows of a long text would leave tokens out."""
    window, stride = window_and_stride(sampling, row)
    if stride > window:
        raise UserError(
            f"sampling.stride {stride} would skip tokens: a window holds {window}; lower it", "sampling.stride"
        )


def sample_semi_autoregressive(run: SamplingRun) -> Iterator[Frame]:
    """Ancestral sampling; a canvas longer than the model is filled in overlapping windows.

    A window slides over the canvas, and filled tokens are the prompt of the next window. A training row is
    [bos] text [eos], where the text is cut from a longer one anywhere. So each window is read between a given bos and
    eos, which are not part of the text. Without them the model would draw its own in the middle of the text.
    """
    row = run.row
    assert row is not None
    window, stride = window_and_stride(run.sampling, row)
    if run.canvas.shape[1] <= row.length:
        return sample_positions_first(run)
    bounded = with_boundaries(
        lambda part: sample_positions_first(replace(run, canvas=part, pad=None)), row.before, row.after
    )
    return sample_windows(bounded, run.canvas, run.mask_id, window, stride)


def with_boundaries(sampler: WindowSampler, before: Sequence[int], after: Sequence[int]) -> WindowSampler:
    """A sampler that reads the canvas between the given ids; its Frames hold the canvas alone."""

    def sample_between(canvas: Tensor) -> Iterator[Frame]:
        first, last = (canvas.new_tensor(ids).expand(len(canvas), -1) for ids in (before, after))
        text = slice(len(before), len(before) + canvas.shape[1])
        for frame in sampler(torch.cat([first, canvas, last], dim=1)):
            yield replace(
                frame,
                ids=frame.ids[:, text],
                revealed=frame.revealed[:, text],
                remasked=frame.remasked[:, text],
                chance=frame.chance[:, text],
                read=frame.read[:, text],
            )

    return sample_between


def sample_blocks(
    sampler: Sampler,
    run: SamplingRun,
    bounds: Sequence[tuple[int, int]],
    open_block: OpenBlock,
    ending: Ending | None = None,
) -> Iterator[Frame]:
    """One text block after the other, each by `sampler`, in its own time from 1 to t_end; the first Frame is the
    canvas.

    A block reads the text up to its end, never what follows. Rows that have no mask in a block wait for the others.
    `ending` says which texts end with the first eos drawn, see `end_texts`.
    """
    state = first_frame(run.canvas, run.mask_id)
    yield state
    for start, stop in bounds:
        before, part = state, slice(0, stop)
        if not (before.ids[:, part] == run.mask_id).any():
            continue
        canvas, pad = before.ids[:, part], None if run.pad is None else run.pad[:, part]
        frames = sampler.sample(replace(run, denoiser=open_block(canvas, start, pad), canvas=canvas, pad=pad))
        next(frames)  # the block before any step
        for frame in frames:
            state = _embed(before, frame, part)
            yield state
        if (ended := _ended(state, ending)) is not None:
            state = ended
            yield state


def sample_long(
    write: WriteText,
    mask_id: int,
    row: Row,
    canvas: Tensor,
    ending: Ending | None,
    pad: Tensor | None,
    holes: Sequence[ConstrainedHole] = (),
) -> Iterator[Frame]:
    """`write` for models that write from left to right; a canvas longer than their rows is written in windows.

    Each window begins as a training row does, then has the last half of the text of the window before. So a token is
    drawn given half a row of the text before it, or more.
    """
    if canvas.shape[1] <= row.length:
        yield from write(canvas, ending, pad, holes)
        return
    assert not holes, "LanguageModel.plan refuses them"
    state = first_frame(canvas, mask_id)
    yield state
    start, stop = 0, row.length
    first: Sequence[int] = ()
    while True:
        window, before = slice(start, min(stop, canvas.shape[1])), state
        if (before.ids[:, window] == mask_id).any():
            window_ending, window_pad = ending, None if pad is None else F.pad(pad[:, window], (len(first), 0))
            if ending is not None:
                window_ending = replace(ending, where=F.pad(ending.where[:, window], (len(first), 0)))
            write_window = partial(write, ending=window_ending, pad=window_pad)
            frames = with_boundaries(write_window, first, ())(before.ids[:, window])
            next(frames)  # the window before any step
            for frame in frames:
                state = _embed(before, frame, window)
                yield state
            if (ended := _ended(state, ending)) is not None:
                state = ended
                yield state
        if stop >= canvas.shape[1]:
            return
        first = row.before
        start = stop - (row.length - len(first)) // 2
        stop = start + row.length - len(first)


def _ended(state: Frame, ending: Ending | None) -> Frame | None:
    """The frame in which masks after the end of a text are filled; None if there are none."""
    ended = end_texts(state, ending)
    if (ended.ids == state.ids).all():
        return None
    return replace(ended, revealed=ended.ids != state.ids, read=state.ids)


def sample_windows(sampler: WindowSampler, canvas: Tensor, mask_id: int, length: int, stride: int) -> Iterator[Frame]:
    """Fills the first `length` tokens, moves the window by `stride`, fills the new masks given the rest, and repeats.

    Time runs from 1 to t_end in every window.
    """
    state = first_frame(canvas, mask_id)
    yield state
    start, width = 0, canvas.shape[1]
    while True:
        window = slice(start, start + length)
        before = state
        if (before.ids[:, window] == mask_id).any():
            frames = sampler(before.ids[:, window])
            next(frames)  # the window before any step
            for frame in frames:
                state = _embed(before, frame, window)
                yield state
        if start + length >= width:
            return
        start = min(start + stride, width - length)


def _embed(before: Frame, frame: Frame, window: slice) -> Frame:
    """A window's Frame as a Frame of the canvas; tokens of earlier windows keep their probabilities."""
    chance = torch.where(before.ids[:, window] != frame.ids, frame.chance, before.chance[:, window])

    def replace_window(canvas: Tensor, values: Tensor) -> Tensor:
        return torch.cat([canvas[:, : window.start], values, canvas[:, window.stop :]], dim=1)

    nowhere = torch.zeros_like(before.revealed)
    return Frame(
        replace_window(before.ids, frame.ids),
        frame.t,
        replace_window(nowhere, frame.revealed),
        replace_window(nowhere, frame.remasked),
        replace_window(before.chance, chance),
        replace_window(before.ids, frame.read),
        frame.alpha,
    )


def _needs_a_network(run: SamplingRun) -> Iterator[Frame]:
    raise NotImplementedError("methods/speculative.py samples this way, with the network itself")


ANCESTRAL = Sampler(sample_positions_first, remasks=False, constrained=True)
REMDM_CAP = Sampler(sample_positions_first, cap_steps, constrained=True)
REMDM_RESCALE = Sampler(sample_positions_first, rescale_steps, constrained=True)
REMDM_CONF = Sampler(sample_remdm_conf, constrained=True)
REMDM_LOOP = Sampler(sample_positions_first, loop_steps, constrained=True)
FORWARD_BACKWARD = Sampler(sample_positions_first, forward_backward_steps, constrained=True)
DFM = Sampler(sample_positions_first, corrector_steps, constrained=True)
ANALYTIC = Sampler(sample_analytic, remasks=False, constrained=True)
SEMI_AUTOREGRESSIVE = Sampler(sample_semi_autoregressive, long_texts=True, remasks=False, constrained=True)
LEFT_TO_RIGHT = Sampler(partial(sample_ordered, by_position=leftmost), remasks=False, constrained=True)
CONFIDENCE = Sampler(partial(sample_ordered, by_beliefs=confidence), remasks=False, constrained=True)
CERTAINTY = Sampler(partial(sample_ordered, by_beliefs=certainty), remasks=False, constrained=True)
MARGIN = Sampler(partial(sample_ordered, by_beliefs=margin), remasks=False, constrained=True)
ENTROPY = Sampler(partial(sample_ordered, by_beliefs=entropy), remasks=False, constrained=True)
THRESHOLD = Sampler(partial(sample_ordered, by_beliefs=confidence, threshold=True), remasks=False, constrained=True)
SPECULATIVE = Sampler(_needs_a_network, block_causal=True, remasks=False, constrained=True)
RATES = Sampler(sample_by_rates, rated=True, remasks=False, constrained=True)
ANCHOR_FIRST = Sampler(
    partial(sample_ordered, by_position=anchor_first), anchored=True, remasks=False, constrained=True
)
