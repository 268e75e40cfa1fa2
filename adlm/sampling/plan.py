"""Positions first: where and when a walk changes, drawn before any network is called. Knows no beliefs.

A masked place is revealed with a chance that depends on the step alone, a visible one masked again likewise; so the
places are a Markov chain of their own, and the network is needed only at the places of a step that reveals something.
Rows share nothing: each goes from one of its reveals to the next, and the c-th call of the network reads every row
before its own c-th reveal.

Shapes: B rows, L places, K steps, C calls, R reveals in all.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.sampling.draws import RowDraws
from adlm.sampling.steps import Steps

STEPS_AT_ONCE = 64  # whose uniform numbers are held at a time: for 1024 places 0.5 MB a row


@dataclass(frozen=True)
class Call:
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
    """(rows,), the share of visible tokens that the network is told."""
    t: Tensor
    """(B,), the time each row has come to by it."""


@dataclass(frozen=True)
class Plan:
    """A batch's whole walk but for the tokens."""

    order: Tensor
    """(B,), the canvas's rows as the calls count them: those with the most calls first."""
    calls: list[Call]


@dataclass(frozen=True)
class Happenings:
    """What happens at one place of one row, an entry each, in the order of steps."""

    call: NDArray[np.int64]
    row: NDArray[np.int64]
    place: NDArray[np.int64]
    step: NDArray[np.int64]


def plan_walk(steps: Steps, open_: Tensor, draws: RowDraws) -> Plan:
    """Every change of a walk over the open places (B, L) of a canvas; what is masked at the end gets a last call."""
    reveals, hides, num_calls = happenings(steps, open_.cpu().numpy(), draws)
    num_rows, length = open_.shape
    order = np.argsort(-num_calls, kind="stable")
    rank, most = np.argsort(order), int(num_calls.max())
    at_step = np.full((most, num_rows), len(steps.reveal))
    at_step[reveals.call, rank[reveals.row]] = reveals.step
    alpha = torch.cat([steps.alpha_t, steps.alpha_s[-1:]])[torch.from_numpy(at_step)]
    t = torch.cat([steps.t[1:], steps.t[-1:]])[torch.from_numpy(at_step)]
    last = reveals.step == len(steps.reveal)

    def by_call(of: Happenings, what: NDArray[np.generic]) -> tuple[Tensor, ...]:
        whole = torch.from_numpy(what[np.argsort(of.call, kind="stable")]).to(open_.device)
        return torch.split(whole, np.bincount(of.call, minlength=most).tolist())

    parts = zip(
        by_call(hides, rank[hides.row] * length + hides.place),
        by_call(reveals, rank[reveals.row] * length + reveals.place),
        by_call(reveals, _points(reveals, draws)),
        by_call(reveals, last),
        np.bincount(reveals.call[last], minlength=most),
        strict=True,
    )
    calls = []
    for number, (hidden, revealed, points, ends, any_ends) in enumerate(parts):
        rows = int((num_calls > number).sum())
        calls.append(Call(hidden, revealed, points, ends if any_ends else None, rows, alpha[number, :rows], t[number]))
    return Plan(torch.from_numpy(order), calls)


def happenings(
    steps: Steps, open_: NDArray[np.bool_], draws: RowDraws
) -> tuple[Happenings, Happenings, NDArray[np.int64]]:
    """Reveals, remaskings, and the number of calls each row needs.

    A place masked again by a step is hidden before the row's next call: that step's own reveals were read with it.
    """
    reveal, remask = steps.reveal.numpy(), steps.remask.numpy()
    masked, num_calls = open_.copy(), np.zeros(len(open_), dtype=np.int64)
    found: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])  # reveals, remaskings

    def note(kind: int, where: NDArray[np.bool_], step: int) -> None:
        row, place = where.nonzero()
        found[kind].append(np.stack([num_calls[row], row, place, np.full_like(row, step)]))

    for step in range(len(reveal)):
        if step % STEPS_AT_ONCE == 0:
            points = _numbers(open_, draws)
        below = points[:, step % STEPS_AT_ONCE]
        reveals = masked & (below < reveal[step])
        remasks = open_ & ~masked & (below < remask[step])
        if reveals.any():
            note(0, reveals, step)
            num_calls += reveals.any(axis=1)
        if remasks.any():
            note(1, remasks, step)
        masked = (masked & ~reveals) | remasks
    if masked.any():
        note(0, masked, len(reveal))
        num_calls += masked.any(axis=1)
    nothing = np.zeros((4, 0), dtype=np.int64)
    told = [Happenings(*np.concatenate([nothing, *each], axis=1)) for each in found]
    return told[0], told[1], num_calls


def _numbers(open_: NDArray[np.bool_], draws: RowDraws) -> NDArray[np.float64]:
    """(B, STEPS_AT_ONCE, L), uniform at open places; 1 elsewhere, which is below no chance."""
    points = np.ones((len(open_), STEPS_AT_ONCE, open_.shape[1]))
    for row, places in enumerate(open_):
        points[row][:, places] = draws.for_places(row, STEPS_AT_ONCE, int(places.sum()))
    return points


def _points(reveals: Happenings, draws: RowDraws) -> NDArray[np.float64]:
    """For every reveal a uniform number of its row's own, in the order of the row's reveals."""
    points = np.empty(len(reveals.row))
    counts = np.bincount(reveals.row, minlength=len(draws))
    drawn = [draws.for_tokens(row, int(count)) for row, count in enumerate(counts)]
    points[np.argsort(reveals.row, kind="stable")] = np.concatenate(drawn)
    return points
