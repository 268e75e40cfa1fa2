"""The interface of a sampler: the run it is given, the denoiser it calls and the frames it yields.

Shapes: B sequences, L tokens, N positions, V symbols. Positions are flat: row * L + position.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.errors import UserError
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens
from adlm.sampling.steps import Steps

NOT_FINITE = "the model's beliefs are not finite: its weights are damaged or its precision is too low"


@dataclass(frozen=True)
class Frame:
    """One state of a sampling run. Rows advance independently: each has its own time."""

    ids: Tensor
    """(B, L), the mask id where nothing is revealed yet."""
    t: Tensor
    """(B,), the time each row has reached, in double precision; 1 at the start."""
    revealed: Tensor
    """(B, L), True where a mask became a token since the previous frame."""
    remasked: Tensor
    """(B, L), True where a token was remasked since the previous frame; it may have been revealed again since."""
    chance: Tensor
    """(B, L), the probability of each token when it was drawn; 1 at given tokens, 0 at masks."""
    read: Tensor
    """(B, L), the ids that the network read to reveal the tokens revealed here; the canvas on the first frame.

    On a canvas longer than the model, the network read only the current window of them.
    """
    alpha: Tensor | None
    """(B,), the share of visible tokens given to a time-conditioned network; None if the share of masks is used."""
    open: Tensor | None = None
    """(B, L), True in holes of unknown length; None without any. The first eos there ends the hole, and the others up
    to its last position only fill it: none of them is part of the text."""
    arranged: Tensor | None = None
    """(B, A), what the network read in place of `read` if the canvas was rearranged, see `methods/infilling.py`."""
    place: Tensor | None = None
    """(B, L), where in `arranged` each token of the hole is that is being filled; -1 at other tokens."""


def last_frame(frames: Iterator[Frame]) -> Frame:
    """The last frame of a sampling run; earlier frames are discarded as they come."""
    last: Frame = deque(frames, maxlen=1)[0]
    if not last.chance.isfinite().all():
        raise UserError(NOT_FINITE)
    return last


def first_frame(canvas: Tensor, mask_id: int) -> Frame:
    """The canvas itself, before any step."""
    nowhere = torch.zeros_like(canvas, dtype=torch.bool)
    start = torch.ones(len(canvas), dtype=torch.float64)
    return Frame(canvas, start, nowhere, nowhere, (canvas != mask_id).float(), canvas, None)


@dataclass(frozen=True)
class Ending:
    """The token that ends a text, and where: tokens that were given end nothing."""

    eos_id: int
    where: Tensor
    """(B, L), True at masks of the canvas that end with the first eos drawn there."""

    def __call__(self, ids: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """ids and chances (B, L) with every text ended by its first drawn eos, which also fills the masks after it."""
        is_end = (ids == self.eos_id) & self.where
        after = (is_end.cumsum(dim=1) - is_end.long() > 0) & self.where
        return ids.masked_fill(after, self.eos_id), chance.masked_fill(after, 1.0)


def end_texts(frame: Frame, ending: Ending | None) -> Frame:
    """The frame with its texts ended; None ends none."""
    if ending is None:
        return frame
    ids, chance = ending(frame.ids, frame.chance)
    return replace(frame, ids=ids, revealed=frame.revealed | (ids != frame.ids), chance=chance)


class DenoiserOutput(Protocol):
    """The output for one state. Heads run on demand at given positions: a head costs as much as a few blocks."""

    def log_beliefs(self, positions: Tensor) -> Tensor:
        """(N, V), log beliefs in the clean token at masked positions (N,); -inf at the mask."""
        ...

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        """(N, V), those of the anchor network."""
        ...


@dataclass(frozen=True)
class NoisyRows:
    """What a denoiser reads in one call."""

    z: Tensor
    """(B, L), noisy ids."""
    alpha: Tensor | None = None
    """(B,), the share of visible tokens, for time-conditioned networks; None: the share of masks is used instead."""
    pad: Tensor | None = None
    """(B, L), True at padding."""
    rows: Tensor | None = None
    """(B,), the rows of the canvas that z has; None is all of them. A denoiser with a cache needs them."""
    step: Tensor | None = None
    """(B,), on the host, the step that each row has reached; None counts the calls."""


Denoiser = Callable[[NoisyRows], DenoiserOutput]


@dataclass(frozen=True)
class Row:
    """The rows that the model was trained on: [before] text [after], `length` tokens in all."""

    length: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class KnownText:
    """A text whose tokens a sampler reveals in place of drawn ones, and its nats: teacher forcing."""

    ids: Tensor
    """(B, L)"""
    nats: Tensor
    """(B, L), -log belief in each token in the step that revealed it, in double precision; `reveal` writes them."""

    def reveal(self, log_beliefs: Tensor, z: Tensor, positions: Tensor, rows: Tensor | None = None) -> DrawnTokens:
        """The tokens at masked positions (N,) of z, which is the whole text or begins it, with beliefs (N, V).

        `rows` are the rows of the text that z has; None is all of them, in order.

        An ordered sampler asks for tokens that it does not reveal yet. It asks again in a later step, which overwrites
        their nats, until the step that reveals them.
        """
        row, place = torch.div(positions, z.shape[1], rounding_mode="floor"), positions % z.shape[1]
        row = row if rows is None else rows[row]
        tokens = self.ids[row, place]
        log_p = log_beliefs.gather(-1, tokens[:, None])[:, 0].double()
        self.nats[row, place] = -log_p
        return DrawnTokens(tokens, log_p.exp().float())


@dataclass(frozen=True)
class SamplingRun:
    """The input of a sampler: a canvas, the network that fills it in, and how."""

    denoiser: Denoiser
    canvas: Tensor
    """(B, L), mask ids where text is wanted."""
    mask_id: int
    steps: Steps
    sampling: Sampling
    rng: RowRng
    pad: Tensor | None = None
    """(B, L), True after the end of shorter rows."""
    row: Row | None = None
    """What the model reads at once; needed for canvases longer than that."""
    text: KnownText | None = None
    """A text to reveal and to score, for ancestral and the samplers ORDERS of the registry; None samples one."""
    holes: tuple[ConstrainedHole, ...] = ()
    """Holes of the canvas whose text is constrained, for samplers that are `constrained`."""
