"""Texts longer than the model: a window slides over the canvas, what it leaves behind stays as the next one's prompt.

Knows a walk only as a function from a canvas to Frames.

A training row is [bos] text [eos], cut from a longer text anywhere. So a window is read between bos and eos too: they
are given, and no part of the text. A window without them would draw its own, in the middle of the text.

Shapes: B sequences, L tokens, of which the window holds at most `length`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adlm.sampling.frame import Frame, first_frame

WindowSampler = Callable[[Tensor], Iterator[Frame]]
"""canvas -> Frames, the first of which is the canvas."""


def framed(walk: WindowSampler, before: Sequence[int], after: Sequence[int]) -> WindowSampler:
    """The walk of a canvas that is read between given ids; its Frames are of the canvas alone."""

    def walk_between(canvas: Tensor) -> Iterator[Frame]:
        first, last = (canvas.new_tensor(ids).expand(len(canvas), -1) for ids in (before, after))
        text = slice(len(before), len(before) + canvas.shape[1])
        for frame in walk(torch.cat([first, canvas, last], dim=1)):
            yield replace(
                frame,
                ids=frame.ids[:, text],
                revealed=frame.revealed[:, text],
                remasked=frame.remasked[:, text],
                chance=frame.chance[:, text],
                read=frame.read[:, text],
            )

    return walk_between


def sample_windows(walk: WindowSampler, canvas: Tensor, mask_id: int, length: int, stride: int) -> Iterator[Frame]:
    """Fills the first `length` tokens, moves on by `stride`, fills what is new given the rest, and so to the end.

    Time runs from 1 to its end in every window.
    """
    whole = first_frame(canvas, mask_id)
    yield whole
    start, width = 0, canvas.shape[1]
    while True:
        part = slice(start, start + length)
        before = whole
        if (before.ids[:, part] == mask_id).any():
            frames = walk(before.ids[:, part])
            next(frames)  # the window itself
            for frame in frames:
                whole = _laid_over(before, frame, part)
                yield whole
        if start + length >= width:
            return
        start = min(start + stride, width - length)


def _laid_over(before: Frame, frame: Frame, part: slice) -> Frame:
    """A window's Frame as one of the whole canvas; what the window was given keeps the chance it was drawn with."""
    drawn = torch.where(before.ids[:, part] != frame.ids, frame.chance, before.chance[:, part])

    def lay(below: Tensor, above: Tensor) -> Tensor:
        return torch.cat([below[:, : part.start], above, below[:, part.stop :]], dim=1)

    nothing = torch.zeros_like(before.revealed)
    return Frame(
        lay(before.ids, frame.ids),
        frame.t,
        lay(nothing, frame.revealed),
        lay(nothing, frame.remasked),
        lay(before.chance, drawn),
        lay(before.ids, frame.read),
        frame.alpha,
    )
