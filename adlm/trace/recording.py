"""A trace: one row's walk as plain data, replayed by its differences. Knows neither samplers nor how it is shown.

The fields of the JSON are described in docs/trace.md; `VERSION` goes up when one of them changes its meaning.
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
from adlm.trace.moments import MAX_STEPS, AnchorHistory, StepThinning, TraceStep, make_step
from adlm.trace.predictions import Guesses, predict
from adlm.trace.token_text import decode_whole, readable, text_of, token_bytes

VERSION = 2


@dataclass(frozen=True)
class TraceInfo:
    """What was run: the words a reader needs to run it again."""

    name: str
    """The model's, for people: the folder it was loaded from, say."""
    sampler: str
    steps: int
    seed: int | None = None


@dataclass(frozen=True)
class Trace:
    about: TraceInfo
    method: str
    row: int
    frames: int
    """How many frames the walk had, the canvas counted."""
    mask_id: int
    tokenizer: Tokenizer | None
    canvas: tuple[int, ...]
    """The ids of frame 0."""
    moments: tuple[TraceStep, ...]
    """The first is the canvas itself; each of the others is a difference to the one before it."""
    special_tokens: bool = False
    """Whether bos, eos and pad are shown in the text."""

    @property
    def given(self) -> tuple[int, ...]:
        """The places whose tokens the canvas gave."""
        return tuple(place for place, index in enumerate(self.canvas) if index != self.mask_id)

    def states(self) -> Iterator[list[int]]:
        """The ids at every moment."""
        ids = list(self.canvas)
        for each in self.moments:
            for place, (index, _) in each.changed.items():
                ids[place] = index
            yield list(ids)

    @cached_property
    def last(self) -> list[int]:
        *_, last = self.states()
        return last

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of every id that the trace speaks of."""
        spoken = {self.mask_id, *self.canvas}
        for each in self.moments:
            spoken |= {index for index, _ in each.changed.values()}
            spoken |= {index for table in (each.denoiser, each.anchor) for row in table.values() for index, _ in row}
        return {index: token_bytes(self.tokenizer, index) for index in sorted(spoken)}

    @property
    def hidden(self) -> list[int]:
        """The special tokens that the text leaves out."""
        return [] if self.tokenizer is None or self.special_tokens else sorted(self.tokenizer.special_ids)

    def plain(self) -> dict[str, Any]:
        """The trace as JSON has it."""
        return {
            "adlm": __version__,
            "format": "adlm trace",
            "version": VERSION,
            "model": {
                "name": self.about.name,
                "method": self.method,
                "anchor_network": any(each.anchor for each in self.moments),
                "mask_id": self.mask_id,
            },
            "walk": {
                "sampler": self.about.sampler,
                "steps": self.about.steps,
                "seed": self.about.seed,
                "row": self.row,
                "frames": self.frames,
            },
            "text": text_of(self.tokenizer, self.last, self.special_tokens),
            "hidden": self.hidden,
            "tokens": {str(index): readable(data) for index, data in self.pieces.items()},
            "bytes": {str(index): data.hex() for index, data in self.pieces.items() if decode_whole(data) is None},
            "canvas": list(self.canvas),
            "given": list(self.given),
            "moments": [_plain(each) for each in self.moments],
        }


class TraceRecorder:
    """A trace in the making: frames pass `through` unchanged, and `trace` is what has passed so far.

    Frames in which the row does not change are counted and make no moment; every other costs a call of each network.
    """

    def __init__(
        self, lm: LanguageModel, about: TraceInfo, row: int = 0, limit: int = MAX_STEPS, special_tokens: bool = False
    ):
        self._lm, self._about, self._row, self._special_tokens = lm, about, row, special_tokens
        self._first: Frame | None = None
        self._thinning, self._anchoring = StepThinning(limit), AnchorHistory()
        self._frames, self._changed_at = 0, 0

    def through(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        for frame in frames:
            self._see(frame)
            yield frame

    @property
    def trace(self) -> Trace:
        if self._first is None:
            raise UserError("there is no trace of a walk that has not begun: no frame has passed")
        canvas = TraceStep(0, float(self._first.t[self._row]), 0, {}, (), (), {}, {}, {})
        return Trace(
            about=self._about,
            method=self._lm.config.method,
            row=self._row,
            frames=self._frames,
            mask_id=self._lm.mask_id,
            tokenizer=self._lm.tokenizer,
            canvas=tuple(self._first.ids[self._row].tolist()),
            moments=(canvas, *self._thinning.kept),
            special_tokens=self._special_tokens,
        )

    def _see(self, frame: Frame) -> None:
        row, number = self._row, self._frames
        if self._first is None:
            self._first = frame
        elif (frame.revealed[row] | frame.remasked[row]).any():
            expected = predict(self._lm, frame, row)
            self._anchoring.see(self._changed_at, expected.best_anchors())
            self._thinning.add(make_step(number, frame, row, expected, self._anchoring))
            self._changed_at = number
        self._frames = number + 1


def record_trace(lm: LanguageModel, frames: Iterable[Frame], about: TraceInfo, row: int = 0) -> Trace:
    """The trace of a walk, which is walked to its end."""
    recording = TraceRecorder(lm, about, row)
    for _ in recording.through(frames):
        pass
    return recording.trace


def _plain(each: TraceStep) -> dict[str, Any]:
    return {
        "frame": each.frame,
        "t": round(each.t, 6),
        "changes": each.changes,
        "changed": [[place, index, chance] for place, (index, chance) in each.changed.items()],
        "revealed": list(each.revealed),
        "remasked": list(each.remasked),
        "denoiser": _tabled(each.denoiser),
        "anchor": _tabled(each.anchor),
        "anchored": {str(place): frame for place, frame in sorted(each.anchored.items())},
    }


def _tabled(table: dict[int, Guesses]) -> dict[str, list[list[float]]]:
    return {str(place): [list(guess) for guess in row] for place, row in sorted(table.items())}
