"""The moments of one row's walk: what changed in it, and what the networks had expected. Knows no files or screens.

A walk of a thousand steps is thinned by merging neighbours, so that a trace stays small and nothing that happened is
lost: only states in between, and predictions at places that were left alone.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from adlm.sampling.frame import Frame
from adlm.trace.predictions import Guesses, Predictions, guesses

MAX_STEPS = 200  # a trace has at most so many after the first
OTHERS = 64  # predictions are kept where tokens are revealed, and at so many other masks a moment


@dataclass(frozen=True)
class TraceStep:
    """One or more steps of a row, as the difference to the moment before."""

    frame: int
    """The number of the walk's frame that it ends with; the canvas is frame 0."""
    t: float
    changes: int
    """How many frames in which the row changed are merged in it; 0 on the canvas."""
    changed: dict[int, tuple[int, float]]
    """place -> its id and its chance now, wherever something happened."""
    revealed: tuple[int, ...]
    """Places where a mask became a token since the moment before."""
    remasked: tuple[int, ...]
    """Places where a token was masked again since the moment before."""
    denoiser: dict[int, Guesses]
    """place -> what the denoiser expected there when the tokens were drawn: at their places, and at other masks."""
    anchor: dict[int, Guesses]
    """The same of the anchor network."""
    anchored: dict[int, int]
    """revealed place -> since which frame the anchor network's first guess had been the token that was drawn; places
    where it last was another are left out."""


class AnchorHistory:
    """Since when the anchor network's first guess at each mask is what it is."""

    def __init__(self) -> None:
        self._best: dict[int, tuple[int, int]] = {}

    def see(self, frame: int, best: dict[int, int]) -> None:
        """The first guesses at the masks of a frame's state; places that are not masked are forgotten."""
        before = self._best
        self._best = {
            place: (index, before[place][1] if place in before and before[place][0] == index else frame)
            for place, index in best.items()
        }

    def take(self, drawn: dict[int, int]) -> dict[int, int]:
        """place -> since which frame, of those where what is drawn is the first guess; what is drawn is forgotten."""
        best = {place: self._best.pop(place, (None, 0)) for place in drawn}
        return {place: since for place, (index, since) in best.items() if index == drawn[place]}


def make_step(number: int, frame: Frame, row: int, expected: Predictions, anchoring: AnchorHistory) -> TraceStep:
    """What frame `number` did to a row, with what was expected of it."""
    ids, chance = frame.ids[row].tolist(), frame.chance[row].tolist()
    revealed, remasked = _places(frame.revealed[row]), _places(frame.remasked[row])
    kept = _kept(number, expected.places, revealed)
    return TraceStep(
        frame=number,
        t=float(frame.t[row]),
        changes=1,
        changed={place: (ids[place], float(f"{chance[place]:.3g}")) for place in sorted({*revealed, *remasked})},
        revealed=revealed,
        remasked=remasked,
        denoiser=guesses(expected.denoiser, expected.places, kept),
        anchor=guesses(expected.anchor, expected.places, kept),
        anchored=anchoring.take({place: ids[place] for place in revealed}),
    )


class StepThinning:
    """At most `limit` moments: neighbours are merged in pairs, and again, so that all hold 1, 2, 4... changes."""

    def __init__(self, limit: int = MAX_STEPS):
        self.kept: list[TraceStep] = []
        self._limit, self._stride = limit, 1

    def add(self, each: TraceStep) -> None:
        if self.kept and self.kept[-1].changes < self._stride:
            self.kept[-1] = merged(self.kept[-1], each)
        else:
            self.kept.append(each)
        if len(self.kept) > self._limit:
            self._stride *= 2
            pairs = [merged(*self.kept[i : i + 2]) for i in range(0, len(self.kept) - 1, 2)]
            self.kept = pairs + self.kept[2 * len(pairs) :]


def merged(first: TraceStep, second: TraceStep) -> TraceStep:
    """Both as one: the state after the second, and for every token that either drew what it was drawn from."""
    drawn = set(second.revealed)
    return TraceStep(
        frame=second.frame,
        t=second.t,
        changes=first.changes + second.changes,
        changed=dict(sorted((first.changed | second.changed).items())),
        revealed=tuple(sorted({*first.revealed, *second.revealed})),
        remasked=tuple(sorted({*first.remasked, *second.remasked})),
        denoiser=first.denoiser | {place: second.denoiser[place] for place in drawn & set(second.denoiser)},
        anchor=first.anchor | {place: second.anchor[place] for place in drawn & set(second.anchor)},
        anchored={place: since for place, since in first.anchored.items() if place not in drawn} | second.anchored,
    )


def _places(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def _kept(number: int, masks: tuple[int, ...], revealed: tuple[int, ...]) -> list[int]:
    """The places whose predictions are kept: what is revealed, and some others, different ones at every frame."""
    drawn = set(revealed)
    others = [place for place in masks if place not in drawn]
    if len(others) > OTHERS:
        others = random.Random(number).sample(others, OTHERS)
    return sorted({*drawn, *others})
