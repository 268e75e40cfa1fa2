"""Positions-first sampling: when each position changes is drawn before the network is called.

A masked position is revealed with a probability that depends on the step alone, and a visible one is remasked likewise.
The positions are therefore a Markov chain of their own, and the network is needed only at the positions of a step that
reveals something, its head only there. Rows are independent: each goes from one of its reveals to the next, and the
c-th network call reads every row before its own c-th reveal.

Shapes: B rows, L positions, K steps, C calls, R reveals in all, N revealed in one call, V symbols.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.frame import Denoiser, Frame, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import draw_tokens
from adlm.sampling.steps import Steps

CERTAIN = 37.0  # minus the log of less than 2^-53: no uniform number is as near to 1


@dataclass(frozen=True)
class NetworkCall:
    """One reading of the network, and what becomes of it. Places are flat: row * L + place."""

    hidden: Tensor
    """Places that were masked again since the call before."""
    revealed: Tensor
    """(N,), places that are revealed from what the network says now."""
    points: Tensor
    """(N,), the uniform number that each one's token is drawn by."""
    last: Tensor | None
    """(N,), True where a place was still masked when the steps had ended; None where none was."""
    rows: int
    """How many rows have this call: the first so many."""
    alpha: Tensor
    """(B,), the share of visible tokens that the network is told; beyond `rows` it is told to nobody."""
    t: Tensor
    """(B,), the time each row has come to by it."""


@dataclass(frozen=True)
class EventPlan:
    """A batch's whole walk but for the tokens."""

    order: Tensor
    """(B,), the canvas's rows as the calls count them: those with the most calls first."""
    calls: list[NetworkCall]


@dataclass(frozen=True)
class Events:
    """What happens at one place of one row, an entry each: row by row, in the order of steps, then of places."""

    call: NDArray[np.int64]
    row: NDArray[np.int64]
    place: NDArray[np.int64]
    step: NDArray[np.int64]


def plan_events(steps: Steps, open_: Tensor, draws: RowRng) -> EventPlan:
    """Every change of a walk over the open places (B, L) of a canvas; what is masked at the end gets a last call."""
    reveals, hides, num_calls = draw_events(steps, open_.cpu().numpy(), draws)
    num_rows, length = open_.shape
    order = np.argsort(-num_calls, kind="stable")
    rank, most = np.argsort(order), int(num_calls.max())
    at_step = torch.full((most, num_rows), len(steps.reveal))
    at_step.numpy()[reveals.call, rank[reveals.row]] = reveals.step
    last = reveals.step == len(steps.reveal)

    def by_call(of: Events, what: NDArray[np.generic]) -> tuple[Tensor, ...]:
        whole = torch.from_numpy(what[np.argsort(of.call, kind="stable")]).to(open_.device)
        return torch.split(whole, np.bincount(of.call, minlength=most).tolist())

    parts = zip(
        by_call(hides, rank[hides.row] * length + hides.place),
        by_call(reveals, rank[reveals.row] * length + reveals.place),
        by_call(reveals, _points(reveals, draws)),
        by_call(reveals, last),
        np.bincount(reveals.call[last], minlength=most).tolist(),
        (num_calls > np.arange(most)[:, None]).sum(axis=1).tolist(),
        steps.told[at_step],
        steps.reached[at_step],
        strict=True,
    )
    calls = [
        NetworkCall(hidden, revealed, points, ends if num_ends else None, rows, alpha, t)
        for hidden, revealed, points, ends, num_ends, rows, alpha, t in parts
    ]
    return EventPlan(torch.from_numpy(order), calls)


def draw_events(steps: Steps, open_: NDArray[np.bool_], draws: RowRng) -> tuple[Events, Events, NDArray[np.int64]]:
    """Reveals, remaskings, and the number of calls each row needs.

    What happens at a place is drawn as the wait until it does, so steps in which nothing happens cost nothing. A place
    masked again by a step is hidden before the row's next call: that step's own reveals were read with it.
    """
    num_rows, end = len(open_), len(steps.reveal)
    found: tuple[list[NDArray[np.int64]], ...] = ([], [])
    row, place = open_.nonzero()
    step = np.full_like(row, -1)
    for hazard, kind in itertools.cycle(zip((_hazard(steps.reveal), _hazard(steps.remask)), found, strict=True)):
        if len(row) == 0:
            break
        counts = np.bincount(row, minlength=num_rows)
        numbers = np.concatenate([draws.for_places(each, int(count)) for each, count in enumerate(counts)])
        step = _first_step(hazard, step + 1, numbers)
        kind.append(np.stack([row, step, place]))
        row, step, place = kind[-1][:, step < end]
    reveals, hides = (np.concatenate([np.zeros((3, 0), dtype=np.int64), *kind], axis=1) for kind in found)
    calls = np.unique(reveals[0] * (end + 1) + reveals[1])  # what is masked after the last step is revealed at step K
    before = np.searchsorted(calls, np.arange(num_rows + 1) * (end + 1))

    def numbered(kind: NDArray[np.int64], side: Literal["left", "right"]) -> Events:
        row, step, place = kind[:, np.lexsort(kind[::-1])]
        return Events(np.searchsorted(calls, row * (end + 1) + step, side) - before[row], row, place, step)

    return numbered(reveals, "left"), numbered(hides[:, hides[1] < end], "right"), np.diff(before)


def _hazard(chance: Tensor) -> NDArray[np.float64]:
    """(K + 1,), minus the log of the chance that nothing happens before each step; a certain step adds enough."""
    return np.concatenate([[0.0], torch.log1p(-chance).neg().clamp(max=CERTAIN).cumsum(dim=0).numpy()])


def _first_step(
    hazard: NDArray[np.float64], start: NDArray[np.int64], numbers: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The first step from `start` on at which something happens, K if nothing does, by a uniform number each.

    P(nothing happens from `start` to k) = exp(-(hazard[k + 1] - hazard[start])), and it happens by k with the rest.
    """
    return np.searchsorted(hazard[1:], hazard[start] - np.log1p(-numbers), side="right")


def _points(reveals: Events, draws: RowRng) -> NDArray[np.float64]:
    """For every reveal a uniform number of its row's own, in the order of the row's reveals."""
    counts = np.bincount(reveals.row, minlength=len(draws))
    return np.concatenate([draws.for_tokens(row, int(count)) for row, count in enumerate(counts)])


def sample_positions_first(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """From the canvas (B, L) to text, a Frame for every call of the network; the first Frame is the canvas.

    Tokens given on the canvas stay. Nothing here waits for the device: all that the host must know was drawn before.
    """
    yield first_frame(canvas, mask_id)
    plan = plan_events(steps, canvas == mask_id, draws)
    order, host_back = plan.order.to(canvas.device), plan.order.argsort()
    back = host_back.to(canvas.device)
    z, chance = canvas[order], (canvas != mask_id).float()[order]
    pad = None if pad is None else pad[order]
    for call in plan.calls:
        z.view(-1).index_fill_(0, call.hidden, mask_id)
        read = z[back]
        rows = _rows_to_read(call.rows, len(z))
        reading = denoiser(z[:rows], call.alpha[:rows], None if pad is None else pad[:rows])
        log_beliefs = reading.log_beliefs(call.revealed)
        drawn = draw_tokens(log_beliefs, z, call.revealed, call.points, sampling, pad)
        if call.last is not None and sampling.final == "argmax":
            drawn = drawn.but_likeliest(call.last, log_beliefs)
        z.view(-1).index_copy_(0, call.revealed, drawn.tokens)
        chance.view(-1).index_fill_(0, call.hidden, 0.0).index_copy_(0, call.revealed, drawn.chance)
        revealed, remasked = (_flags(z, places)[back] for places in (call.revealed, call.hidden))
        t, alpha = call.t[host_back], call.alpha[host_back]
        yield Frame(z[back], t, revealed, remasked, chance[back], read, alpha)


def _rows_to_read(needed: int, rows: int) -> int:
    """The batch, halved as long as the rows that are needed fit: a device sees few shapes, idle rows cost little."""
    while (rows + 1) // 2 >= needed and rows > 1:
        rows = (rows + 1) // 2
    return rows


def _flags(z: Tensor, places: Tensor) -> Tensor:
    return torch.zeros(z.numel(), dtype=torch.bool, device=z.device).index_fill_(0, places, True).view(z.shape)
