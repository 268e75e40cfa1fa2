"""A trace: the sampling run of one row as data, stored as differences between steps. No samplers, no display.

Each step holds what changed in the row and what the networks predicted there. Long sampling runs are thinned by merging
neighbouring steps. Every revealed and remasked token is kept; intermediate states, and predictions at positions that
did not change, are dropped.

Shapes: n masks, V symbols.

The JSON fields are documented in docs/trace.md; `VERSION` increases when a field changes its meaning.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from adlm import __version__
from adlm.constraints.conditioning import condition
from adlm.constraints.holes import ConstrainedHole
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame
from adlm.tokens import Tokenizer, decode_complete, decode_escaped, text_of, token_bytes

VERSION = 3
MAX_STEPS = 200  # of a trace, not counting the canvas
MAX_OTHER_MASKS = 64  # per step, predictions are stored at revealed positions and at up to this many other masks
NUM_GUESSES = 5

Guesses = tuple[tuple[int, float], ...]
"""Ids with their probabilities, the most probable first."""


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities of the clean token at the masks of the network input."""

    positions: tuple[int, ...]
    """The n predicted masks: all, those of the first block with masks, or, for autoregressive methods, the first."""
    denoiser: Tensor
    """(n, V)"""
    anchor: Tensor | None
    """(n, V); None if there is no anchor network."""

    def best_anchors(self) -> dict[int, int]:
        """The anchor network's top prediction at each position."""
        return {} if self.anchor is None else _argmax_by_position(self.positions, self.anchor)


def predict(lm: LanguageModel, frame: Frame, row: int) -> Predictions:
    """The predictions at the masks of a row from the frame's network input: one call of each network."""
    z, rows, positions = _network_input(lm, frame, row)
    alpha = _conditioning_alpha(frame, row)
    return Predictions(positions, lm.log_probs(z, alpha)[0, rows].float().cpu(), _anchor_log_probs(lm, z, alpha, rows))


def anchors_of(lm: LanguageModel, frame: Frame, row: int) -> dict[int, int]:
    """The anchor network's top prediction at each mask, without a denoiser call; empty without an anchor network."""
    z, rows, positions = _network_input(lm, frame, row)
    anchor = _anchor_log_probs(lm, z, _conditioning_alpha(frame, row), rows)
    return {} if anchor is None else _argmax_by_position(positions, anchor)


def guesses(log_probs: Tensor | None, positions: tuple[int, ...], wanted: Iterable[int]) -> dict[int, Guesses]:
    """The most probable tokens at the wanted positions that are predicted, their probabilities with three digits."""
    if log_probs is None:
        return {}
    row_of = {position: row for row, position in enumerate(positions)}
    found = [position for position in wanted if position in row_of]
    beliefs = log_probs[[row_of[position] for position in found]].exp()
    best = beliefs.topk(min(NUM_GUESSES, beliefs.shape[-1]), dim=-1)
    return {
        position: tuple((index, float(f"{chance:.3g}")) for index, chance in zip(ids, chances, strict=True))
        for position, ids, chances in zip(found, best.indices.tolist(), best.values.tolist(), strict=True)
    }


def _network_input(lm: LanguageModel, frame: Frame, row: int) -> tuple[Tensor, list[int], tuple[int, ...]]:
    """The network input (1, l), the output rows to read, and the positions in the row of the frame that they predict.

    An autoregressive output row predicts the next position. Block-causal networks predict the first block with masks.
    """
    z = frame.read[row] if frame.arranged is None else frame.arranged[row]
    masks, block_length = (z == lm.mask_id).nonzero().flatten().tolist(), lm.config.model.block_length
    if masks and lm.method.causal:
        return z[None, : masks[0]], [masks[0] - 1], (masks[0],)
    if masks and block_length:
        z = z[: 1 + -(-max(masks[0], 1) // block_length) * block_length]
        masks = [position for position in masks if position < len(z)]
    if frame.place is None:
        return z[None], masks, tuple(masks)
    place = frame.place[row].tolist()
    return z[None], masks, tuple(place.index(position) for position in masks)


def _conditioning_alpha(frame: Frame, row: int) -> float | None:
    return None if frame.alpha is None else float(frame.alpha[row])


def _anchor_log_probs(lm: LanguageModel, z: Tensor, alpha: float | None, rows: list[int]) -> Tensor | None:
    try:
        return lm.anchor_logits(z, alpha)[0, rows].float().log_softmax(-1).cpu()
    except UserError:  # the method has no anchor network
        return None


def _argmax_by_position(positions: tuple[int, ...], log_probs: Tensor) -> dict[int, int]:
    return dict(zip(positions, log_probs.argmax(-1).tolist(), strict=True))


@dataclass(frozen=True)
class TraceStep:
    """One or more merged frames of a row, as the difference to the previous step."""

    frame: int
    """The number of its last frame; the canvas is frame 0."""
    t: float
    changes: int
    """The number of merged frames in which the row changed; 0 for the canvas."""
    changed: dict[int, tuple[int, float]]
    """position -> new id and its probability, for every position that changed."""
    revealed: tuple[int, ...]
    """Positions where a mask was revealed since the previous step."""
    remasked: tuple[int, ...]
    """Positions where a token was remasked since the previous step."""
    denoiser: dict[int, Guesses]
    """position -> the denoiser's predictions when the tokens were drawn, at revealed positions and at other masks."""
    anchor: dict[int, Guesses]
    """The same for the anchor network."""
    anchored: dict[int, int]
    """revealed position -> the frame since which the drawn token has been the anchor network's top prediction;
    positions with another top prediction are left out."""
    conditioned: dict[int, Guesses] = field(default_factory=dict)
    """position in a constrained hole -> the denoiser's predictions given the constraint."""
    log_mass: dict[int, float] = field(default_factory=dict)
    """number of a constrained hole -> the log probability that independent draws from the predictions satisfy it."""


@dataclass(frozen=True)
class HolePrediction:
    """What a constraint makes of the denoiser's predictions at the masks of a hole."""

    log_mass: float
    """The log probability that independent draws from the predictions satisfy the constraint."""
    guesses: dict[int, Guesses]
    """position -> the most probable tokens given the constraint, of every mask of the hole."""


def constrain(predictions: Predictions, read: Tensor, hole: ConstrainedHole, mask_id: int) -> HolePrediction | None:
    """The predictions at the masks of a hole given its constraint, for the ids (L,) that the network read.

    Of a hole of which only the first masks are predicted, these; None if there are none. Holes of one name have the
    same tokens.
    """
    row_of = {position: row for row, position in enumerate(predictions.positions)}
    ids = hole.ids(read.cpu(), mask_id)
    is_masked = (ids == mask_id).tolist()
    places = list(
        takewhile(
            lambda place: not is_masked[place] or all(start + place in row_of for start in hole.starts),
            range(len(ids)),
        )
    )
    masks = [place for place in places if is_masked[place]]
    if not masks:
        return None
    rows = torch.tensor([[row_of[start + place] for place in masks] for start in hole.starts])
    conditioned = condition(predictions.denoiser[rows].sum(dim=0), hole.automaton, ids[: len(places)], mask_id)
    found: dict[int, Guesses] = {}
    for start in hole.starts:
        positions = tuple(start + place for place in masks)
        for position, best in guesses(conditioned.log_marginals, positions, positions).items():
            found[position] = tuple(guess for guess in best if guess[1] > 0)  # often only few tokens are allowed
    return HolePrediction(conditioned.log_mass, found)


class AnchorHistory:
    """The anchor network's top prediction at each mask, and the frame since which it has not changed."""

    def __init__(self) -> None:
        self._best: dict[int, tuple[int, int]] = {}

    def update(self, frame: int, best: dict[int, int]) -> None:
        """Set the top predictions at the masks of a frame; positions that are not masked are removed."""
        previous = self._best
        self._best = {
            position: (
                index,
                previous[position][1] if position in previous and previous[position][0] == index else frame,
            )
            for position, index in best.items()
        }

    def pop(self, drawn: dict[int, int]) -> dict[int, int]:
        """position -> frame since which the drawn token is the top prediction, where it is. Removes drawn positions."""
        best = {position: self._best.pop(position, (None, 0)) for position in drawn}
        return {position: since for position, (index, since) in best.items() if index == drawn[position]}


def make_step(
    number: int,
    frame: Frame,
    row: int,
    predictions: Predictions,
    history: AnchorHistory,
    holes: Mapping[int, HolePrediction] = MappingProxyType({}),
) -> TraceStep:
    """The changes of frame `number` in a row, with the predictions that they were drawn from."""
    ids, chance = frame.ids[row].tolist(), frame.chance[row].tolist()
    revealed, remasked = _true_positions(frame.revealed[row]), _true_positions(frame.remasked[row])
    other_masks = sorted(set(predictions.positions) - set(revealed))
    if len(other_masks) > MAX_OTHER_MASKS:
        other_masks = random.Random(number).sample(other_masks, MAX_OTHER_MASKS)
    stored = sorted({*revealed, *other_masks})
    return TraceStep(
        frame=number,
        t=float(frame.t[row]),
        changes=1,
        changed={
            position: (ids[position], float(f"{chance[position]:.3g}")) for position in sorted({*revealed, *remasked})
        },
        revealed=revealed,
        remasked=remasked,
        denoiser=guesses(predictions.denoiser, predictions.positions, stored),
        anchor=guesses(predictions.anchor, predictions.positions, stored),
        anchored=history.pop({position: ids[position] for position in revealed}),
        conditioned={key: value for hole in holes.values() for key, value in hole.guesses.items() if key in stored},
        log_mass={number: float(f"{hole.log_mass:.4g}") for number, hole in holes.items()},
    )


class StepThinning:
    """Keeps at most `limit` steps by repeatedly merging neighbours in pairs; each then holds 1, 2, 4, ... changes."""

    def __init__(self, limit: int = MAX_STEPS):
        self.steps: list[TraceStep] = []
        self._limit, self._stride = limit, 1

    def add(self, step: TraceStep) -> None:
        if self.steps and self.steps[-1].changes < self._stride:
            self.steps[-1] = merge(self.steps[-1], step)
        else:
            self.steps.append(step)
        if len(self.steps) > self._limit:
            self._stride *= 2
            pairs = [merge(*self.steps[i : i + 2]) for i in range(0, len(self.steps) - 1, 2)]
            self.steps = pairs + self.steps[2 * len(pairs) :]


def merge(first: TraceStep, second: TraceStep) -> TraceStep:
    """Two steps as one: the state after the second, and the predictions that every revealed token was drawn from."""
    drawn = set(second.revealed)
    return TraceStep(
        frame=second.frame,
        t=second.t,
        changes=first.changes + second.changes,
        changed=dict(sorted((first.changed | second.changed).items())),
        revealed=tuple(sorted({*first.revealed, *second.revealed})),
        remasked=tuple(sorted({*first.remasked, *second.remasked})),
        denoiser=first.denoiser | {position: second.denoiser[position] for position in drawn & set(second.denoiser)},
        anchor=first.anchor | {position: second.anchor[position] for position in drawn & set(second.anchor)},
        anchored={position: since for position, since in first.anchored.items() if position not in drawn}
        | second.anchored,
        conditioned=first.conditioned
        | {position: second.conditioned[position] for position in drawn & set(second.conditioned)},
        log_mass=second.log_mass | first.log_mass,
    )


def _true_positions(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


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
    open: tuple[int, ...] = ()
    """The positions in holes of unknown length: an eos there is no part of the text."""
    holes: tuple[ConstrainedHole, ...] = ()
    """Those of the row, whose text is constrained."""

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
    def left_out(self) -> set[int]:
        """The positions in the last state that are no part of the text."""
        eos_id = None if self.tokenizer is None else self.tokenizer.vocabulary.eos_id
        return {position for position in self.open if self.last[position] == eos_id}

    @property
    def text(self) -> str:
        ids = [index for position, index in enumerate(self.last) if position not in self.left_out]
        return text_of(self.tokenizer, ids, self.special_tokens)

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of every id that occurs in the trace."""
        ids = {self.mask_id, *self.canvas}
        for step in self.steps:
            ids |= {index for index, _ in step.changed.values()}
            tables = (step.denoiser, step.anchor, step.conditioned)
            ids |= {index for table in tables for row in table.values() for index, _ in row}
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
            "text": self.text,
            "hidden": self.hidden,
            **pieces_to_dict(self.pieces),
            "canvas": list(self.canvas),
            "given": list(self.given),
            "open": list(self.open),
            "constraints": [
                {"name": hole.name, "starts": list(hole.starts), "length": hole.automaton.num_places}
                for hole in self.holes
            ],
            "steps": [_step_to_dict(step) for step in self.steps],
        }


class StepRecorder:
    """The steps of one row, frame by frame. Frames in which it does not change are only counted."""

    def __init__(self, lm: LanguageModel, row: int = 0, holes: Sequence[ConstrainedHole] = ()):
        self._lm, self._row, self.holes = lm, row, tuple(hole for hole in holes if hole.row == row)
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
        held = {
            number: found
            for number, hole in enumerate(self.holes)
            if (found := constrain(predictions, frame.read[row], hole, self._lm.mask_id)) is not None
        }
        step = make_step(number, frame, row, predictions, self._history, held)
        if self._lm.config.model.block_length:  # each block has a time of its own; this is that of the text
            left = float((frame.ids[row] == self._lm.mask_id).double().mean())
            step = replace(step, t=left)
        return step

    def trace(self, info: TraceInfo, frame: Frame, steps: tuple[TraceStep, ...], special_tokens: bool = False) -> Trace:
        """The trace of steps so far, whose first one is of this frame."""
        return Trace(
            info=info,
            method=self._lm.config.method,
            row=self._row,
            frames=self.num_frames,
            mask_id=self._lm.mask_id,
            tokenizer=self._lm.tokenizer,
            canvas=tuple(frame.ids[self._row].tolist()),
            steps=steps,
            special_tokens=special_tokens,
            open=() if frame.open is None else _true_positions(frame.open[self._row]),
            holes=self.holes,
        )


class TraceRecorder:
    """Records frames as they pass through `record` unchanged; `trace` is the trace of the frames so far.

    Frames in which the row does not change are only counted; every other frame costs one call of each network.
    """

    def __init__(
        self,
        lm: LanguageModel,
        info: TraceInfo,
        row: int = 0,
        limit: int = MAX_STEPS,
        special_tokens: bool = False,
        holes: Sequence[ConstrainedHole] = (),
    ):
        self._info, self._special_tokens = info, special_tokens
        self._first: tuple[Frame, TraceStep] | None = None
        self._thinning, self._recorder = StepThinning(limit), StepRecorder(lm, row, holes)

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
        return self._recorder.trace(self._info, frame, (canvas, *self._thinning.steps), self._special_tokens)


def record_trace(
    lm: LanguageModel,
    frames: Iterable[Frame],
    info: TraceInfo,
    row: int = 0,
    holes: Sequence[ConstrainedHole] = (),
) -> Trace:
    """Run the frames to the end and return their trace; `holes` are the constrained ones of the run."""
    recorder = TraceRecorder(lm, info, row, holes=holes)
    for _ in recorder.record(frames):
        pass
    return recorder.trace


def trace_events(
    lm: LanguageModel,
    frames: Iterable[Frame],
    info: TraceInfo,
    holes: Sequence[ConstrainedHole] = (),
) -> Iterator[dict[str, Any]]:
    """The trace of one row in JSON while it is sampled: its fields without steps and text, every step, then the end.

    Each has one key, `begin`, `step` or `end`; a step brings the `tokens` and `bytes` that are new in it. Together they
    are the trace of `record_trace` with all its steps, however many there are.
    """
    recorder, known, trace = StepRecorder(lm, 0, holes), set[int](), None
    for frame in frames:
        step = recorder.step(frame)
        if step is None:
            continue
        trace = recorder.trace(info, frame, (step,))
        new = {index: data for index, data in trace.pieces.items() if index not in known}
        known.update(new)
        if step.changes == 0:
            fields = trace.to_dict()
            fields["model"]["anchor_network"] = lm.method.anchored
            yield {"begin": {name: value for name, value in fields.items() if name not in ("steps", "text")}}
            new = {}
        yield {"step": {**_step_to_dict(step), **pieces_to_dict(new)}}
    yield {"end": {"frames": recorder.num_frames, "text": "" if trace is None else trace.text}}


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
        **({"conditioned": _guesses_to_dict(step.conditioned)} if step.conditioned else {}),
        **({"log_mass": {str(number): mass for number, mass in step.log_mass.items()}} if step.log_mass else {}),
    }


def _guesses_to_dict(table: dict[int, Guesses]) -> dict[str, list[list[float]]]:
    return {str(position): [list(guess) for guess in row] for position, row in sorted(table.items())}
