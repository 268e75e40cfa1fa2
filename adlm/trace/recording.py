"""A trace: the sampling run of one row as data, stored as differences between steps. No samplers, no display.

The JSON fields are documented in docs/trace.md; `VERSION` increases when a field changes its meaning.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from adlm import __version__
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame
from adlm.tokens import Tokenizer
from adlm.trace.predictions import Guesses, predict
from adlm.trace.steps import MAX_STEPS, AnchorHistory, StepThinning, TraceStep, make_step
from adlm.trace.token_text import decode_complete, decode_escaped, text_of, token_bytes

VERSION = 3


@dataclass(frozen=True)
class TraceInfo:
    """The settings of the sampling run, for the reader of the trace."""

    name: str
    """Display name of the model, such as the folder it was loaded from."""
    sampler: str
    steps: int
    seed: int | None = None


@dataclass(frozen=True)
class Trace:
    info: TraceInfo
    method: str
    row: int
    frames: int
    """The number of frames, including the canvas."""
    mask_id: int
    tokenizer: Tokenizer | None
    canvas: tuple[int, ...]
    """The ids of frame 0."""
    steps: tuple[TraceStep, ...]
    """The canvas, followed by the steps, each a difference to the previous one."""
    special_tokens: bool = False
    """Whether the text includes bos, eos and pad."""

    @property
    def given(self) -> tuple[int, ...]:
        """The positions that are not masked on the canvas."""
        return tuple(position for position, index in enumerate(self.canvas) if index != self.mask_id)

    def states(self) -> Iterator[list[int]]:
        """The ids after every step."""
        ids = list(self.canvas)
        for step in self.steps:
            for position, (index, _) in step.changed.items():
                ids[position] = index
            yield list(ids)

    @cached_property
    def last(self) -> list[int]:
        *_, last = self.states()
        return last

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of every id that occurs in the trace."""
        ids = {self.mask_id, *self.canvas}
        for step in self.steps:
            ids |= {index for index, _ in step.changed.values()}
            ids |= {index for table in (step.denoiser, step.anchor) for row in table.values() for index, _ in row}
        return {index: token_bytes(self.tokenizer, index) for index in sorted(ids)}

    @property
    def hidden(self) -> list[int]:
        """The special tokens that are hidden in the text."""
        return [] if self.tokenizer is None or self.special_tokens else sorted(self.tokenizer.special_ids)

    def to_dict(self) -> dict[str, Any]:
        """The trace in its JSON format."""
        return {
            "adlm": __version__,
            "format": "adlm trace",
            "version": VERSION,
            "model": {
                "name": self.info.name,
                "method": self.method,
                "anchor_network": any(step.anchor for step in self.steps),
                "mask_id": self.mask_id,
            },
            "sampling": {
                "sampler": self.info.sampler,
                "steps": self.info.steps,
                "seed": self.info.seed,
                "row": self.row,
                "frames": self.frames,
            },
            "text": text_of(self.tokenizer, self.last, self.special_tokens),
            "hidden": self.hidden,
            "tokens": {str(index): decode_escaped(data) for index, data in self.pieces.items()},
            "bytes": {str(index): data.hex() for index, data in self.pieces.items() if decode_complete(data) is None},
            "canvas": list(self.canvas),
            "given": list(self.given),
            "steps": [_step_to_dict(step) for step in self.steps],
        }


class TraceRecorder:
    """Records frames as they pass through `record` unchanged; `trace` is the trace of the frames so far.

    Frames in which the row does not change are only counted; every other frame costs one call of each network.
    """

    def __init__(
        self, lm: LanguageModel, info: TraceInfo, row: int = 0, limit: int = MAX_STEPS, special_tokens: bool = False
    ):
        self._lm, self._info, self._row, self._special_tokens = lm, info, row, special_tokens
        self._first: Frame | None = None
        self._thinning, self._history = StepThinning(limit), AnchorHistory()
        self._num_frames, self._last_change = 0, 0

    def record(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        for frame in frames:
            self._record_frame(frame)
            yield frame

    @property
    def trace(self) -> Trace:
        if self._first is None:
            raise UserError("the trace is empty: no frame has been recorded")
        canvas = TraceStep(0, float(self._first.t[self._row]), 0, {}, (), (), {}, {}, {})
        return Trace(
            info=self._info,
            method=self._lm.config.method,
            row=self._row,
            frames=self._num_frames,
            mask_id=self._lm.mask_id,
            tokenizer=self._lm.tokenizer,
            canvas=tuple(self._first.ids[self._row].tolist()),
            steps=(canvas, *self._thinning.steps),
            special_tokens=self._special_tokens,
        )

    def _record_frame(self, frame: Frame) -> None:
        row, number = self._row, self._num_frames
        if self._first is None:
            self._first = frame
        elif (frame.revealed[row] | frame.remasked[row]).any():
            predictions = predict(self._lm, frame, row)
            self._history.update(self._last_change, predictions.best_anchors())
            self._thinning.add(make_step(number, frame, row, predictions, self._history))
            self._last_change = number
        self._num_frames = number + 1


def record_trace(lm: LanguageModel, frames: Iterable[Frame], info: TraceInfo, row: int = 0) -> Trace:
    """Run the frames to the end and return their trace."""
    recorder = TraceRecorder(lm, info, row)
    for _ in recorder.record(frames):
        pass
    return recorder.trace


def _step_to_dict(step: TraceStep) -> dict[str, Any]:
    return {
        "frame": step.frame,
        "t": round(step.t, 6),
        "changes": step.changes,
        "changed": [[position, index, chance] for position, (index, chance) in step.changed.items()],
        "revealed": list(step.revealed),
        "remasked": list(step.remasked),
        "denoiser": _guesses_to_dict(step.denoiser),
        "anchor": _guesses_to_dict(step.anchor),
        "anchored": {str(position): frame for position, frame in sorted(step.anchored.items())},
    }


def _guesses_to_dict(table: dict[int, Guesses]) -> dict[str, list[list[float]]]:
    return {str(position): [list(guess) for guess in row] for position, row in sorted(table.items())}
