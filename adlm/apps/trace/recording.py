"""A trace: the sampling run of one row as data, stored as differences between steps. No samplers, no display.

The JSON fields are documented in docs/trace.md; `VERSION` increases when a field changes its meaning.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from adlm import __version__
from adlm.apps.trace.steps import MAX_STEPS, AnchorHistory, Guesses, StepThinning, TraceStep, make_step, predict
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame
from adlm.tokens import Tokenizer, decode_complete, decode_escaped, text_of, token_bytes

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
            **pieces_to_dict(self.pieces),
            "canvas": list(self.canvas),
            "given": list(self.given),
            "steps": [_step_to_dict(step) for step in self.steps],
        }


class StepRecorder:
    """The steps of one row, frame by frame. Frames in which it does not change are only counted."""

    def __init__(self, lm: LanguageModel, row: int = 0):
        self._lm, self._row = lm, row
        self._history = AnchorHistory()
        self.num_frames = 0
        self._last_change = 0

    def step(self, frame: Frame) -> TraceStep | None:
        """The step of the next frame, at the cost of one call of each network; None if the row does not change.

        The first frame is the canvas.
        """
        row, number = self._row, self.num_frames
        self.num_frames += 1
        if number == 0:
            return TraceStep(0, float(frame.t[row]), 0, {}, (), (), {}, {}, {})
        if not (frame.revealed[row] | frame.remasked[row]).any():
            return None
        predictions = predict(self._lm, frame, row)
        self._history.update(self._last_change, predictions.best_anchors())
        self._last_change = number
        return make_step(number, frame, row, predictions, self._history)


class TraceRecorder:
    """Records frames as they pass through `record` unchanged; `trace` is the trace of the frames so far.

    Frames in which the row does not change are only counted; every other frame costs one call of each network.
    """

    def __init__(
        self, lm: LanguageModel, info: TraceInfo, row: int = 0, limit: int = MAX_STEPS, special_tokens: bool = False
    ):
        self._lm, self._info, self._row, self._special_tokens = lm, info, row, special_tokens
        self._first: tuple[Frame, TraceStep] | None = None
        self._thinning, self._recorder = StepThinning(limit), StepRecorder(lm, row)

    def record(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        for frame in frames:
            step = self._recorder.step(frame)
            if step is not None and self._first is None:
                self._first = frame, step
            elif step is not None:
                self._thinning.add(step)
            yield frame

    @property
    def trace(self) -> Trace:
        if self._first is None:
            raise UserError("the trace is empty: no frame has been recorded")
        frame, canvas = self._first
        return Trace(
            info=self._info,
            method=self._lm.config.method,
            row=self._row,
            frames=self._recorder.num_frames,
            mask_id=self._lm.mask_id,
            tokenizer=self._lm.tokenizer,
            canvas=tuple(frame.ids[self._row].tolist()),
            steps=(canvas, *self._thinning.steps),
            special_tokens=self._special_tokens,
        )


def record_trace(lm: LanguageModel, frames: Iterable[Frame], info: TraceInfo, row: int = 0) -> Trace:
    """Run the frames to the end and return their trace."""
    recorder = TraceRecorder(lm, info, row)
    for _ in recorder.record(frames):
        pass
    return recorder.trace


def trace_events(lm: LanguageModel, frames: Iterable[Frame], info: TraceInfo, row: int = 0) -> Iterator[dict[str, Any]]:
    """The trace in JSON while it is sampled: its fields without steps and text, then every step, then the end.

    Each has one key, `begin`, `step` or `end`; a step brings the `tokens` and `bytes` that are new in it. Together they
    are the trace of `record_trace` with all its steps, however many there are.
    """
    recorder, known, ids = StepRecorder(lm, row), set[int](), list[int]()
    for frame in frames:
        step = recorder.step(frame)
        if step is None:
            continue
        ids = frame.ids[row].tolist()
        trace = Trace(info, lm.config.method, row, recorder.num_frames, lm.mask_id, lm.tokenizer, tuple(ids), (step,))
        new = {index: data for index, data in trace.pieces.items() if index not in known}
        known.update(new)
        if step.changes == 0:
            fields = trace.to_dict()
            fields["model"]["anchor_network"] = lm.method.anchored
            yield {"begin": {name: value for name, value in fields.items() if name not in ("steps", "text")}}
            new = {}
        yield {"step": {**_step_to_dict(step), **pieces_to_dict(new)}}
    yield {"end": {"frames": recorder.num_frames, "text": text_of(lm.tokenizer, ids, special_tokens=False)}}


def pieces_to_dict(pieces: dict[int, bytes]) -> dict[str, Any]:
    return {
        "tokens": {str(index): decode_escaped(data) for index, data in pieces.items()},
        "bytes": {str(index): data.hex() for index, data in pieces.items() if decode_complete(data) is None},
    }


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
