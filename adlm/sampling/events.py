"""Positions-first sampling: the steps at which positions change are drawn before the network is called.

A masked position is revealed with a probability that depends on the step alone, and a visible one is remasked likewise.
The set of masked positions is therefore a Markov chain of its own: a step that reveals nothing needs no network call,
and the head runs only at the revealed positions. Rows are independent: each advances from one of its reveals to the
next, and network call c reads every row just before its own c-th reveal.

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

from adlm.sampling.frame import Frame, SamplingRun, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import draw_tokens
from adlm.sampling.steps import Steps

CERTAIN_HAZARD = 37.0  # > -log 2^-53 = 36.7: -log(1 - u) of a 53-bit uniform u never reaches it


@dataclass(frozen=True)
class NetworkCall:
    """One network call and the changes around it. Positions are flat: row * L + position."""

    remasked: Tensor
    """Positions remasked since the call before."""
    revealed: Tensor
    """(N,), positions revealed from the output of this call."""
    uniforms: Tensor
    """(N,), the uniform number that draws each revealed token."""
    is_final: Tensor | None
    """(N,), True at positions still masked after the last step; None if there are none."""
    num_rows: int
    """How many rows take part in this call: the first `num_rows`."""
    alpha: Tensor
    """(B,), the share of visible tokens that a time-conditioned network is given; unused from row `num_rows` on."""
    t: Tensor
    """(B,), the time each row has reached after this call."""


@dataclass(frozen=True)
class EventPlan:
    """Everything about a batch's sampling run except the tokens."""

    order: Tensor
    """(B,), the canvas rows in the order the calls use: rows with the most calls first."""
    num_calls: int
    calls: Iterator[NetworkCall]
    """Each is made when it is needed: a thousand of them, of small tensors, take megabytes."""


@dataclass(frozen=True)
class Events:
    """Reveals or remaskings, one entry for each (row, step, position), sorted in that order."""

    call: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    step: NDArray[np.int64]


def plan_events(steps: Steps, to_fill: Tensor, rng: RowRng) -> EventPlan:
    """All changes at the positions `to_fill` (B, L); what is masked after the last step is revealed in a final call."""
    reveals, remasks, num_calls = draw_events(steps, to_fill.cpu().numpy(), rng)
    num_rows, length = to_fill.shape
    order = np.argsort(-num_calls, kind="stable")
    rank, max_calls = np.argsort(order), int(num_calls.max())
    step_of_call = torch.full((max_calls, num_rows), len(steps.reveal))
    step_of_call.numpy()[reveals.call, rank[reveals.row]] = reveals.step
    is_final = reveals.step == len(steps.reveal)

    def sort_by_call(events: Events, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values[np.argsort(events.call, kind="stable")]).to(to_fill.device)

    def ends_of_calls(events: Events) -> NDArray[np.int64]:
        return np.concatenate([[0], np.bincount(events.call, minlength=max_calls).cumsum()])

    remasked, remask_ends = sort_by_call(remasks, rank[remasks.row] * length + remasks.position), ends_of_calls(remasks)
    revealed, reveal_ends = sort_by_call(reveals, rank[reveals.row] * length + reveals.position), ends_of_calls(reveals)
    uniforms, final = sort_by_call(reveals, _token_uniforms(reveals, rng)), sort_by_call(reveals, is_final)
    num_final = np.bincount(reveals.call[is_final], minlength=max_calls)

    def calls() -> Iterator[NetworkCall]:
        for call, step in enumerate(step_of_call):
            remasks_here, reveals_here = (slice(*ends[call : call + 2]) for ends in (remask_ends, reveal_ends))
            yield NetworkCall(
                remasked[remasks_here],
                revealed[reveals_here],
                uniforms[reveals_here],
                final[reveals_here] if num_final[call] else None,
                int((num_calls > call).sum()),
                steps.conditioning_alpha[step],
                steps.end_time[step],
            )

    return EventPlan(torch.from_numpy(order), max_calls, calls())


def draw_events(steps: Steps, to_fill: NDArray[np.bool_], rng: RowRng) -> tuple[Events, Events, NDArray[np.int64]]:
    """Reveals, remaskings, and the number of network calls each row needs (B,).

    Each change is drawn as a waiting time, so steps in which nothing changes cost nothing. A position remasked at a
    step is masked before the row's next call: the reveals of that same step were predicted with the token visible.
    """
    num_rows, end = len(to_fill), len(steps.reveal)
    found: tuple[list[NDArray[np.int64]], ...] = ([], [])
    row, position = to_fill.nonzero()
    step = np.full_like(row, -1)
    hazards = (_cumulative_hazard(steps.reveal), _cumulative_hazard(steps.remask))
    for hazard, events in itertools.cycle(zip(hazards, found, strict=True)):
        if len(row) == 0:
            break
        counts = np.bincount(row, minlength=num_rows)
        uniforms = np.concatenate([rng.for_positions(each, int(count)) for each, count in enumerate(counts)])
        step = _first_step(hazard, step + 1, uniforms)
        events.append(np.stack([row, step, position]))
        row, step, position = events[-1][:, step < end]
    reveals, remasks = (np.concatenate([np.zeros((3, 0), dtype=np.int64), *events], axis=1) for events in found)
    calls = np.unique(reveals[0] * (end + 1) + reveals[1])  # what is masked after the last step is revealed at step K
    first_call = np.searchsorted(calls, np.arange(num_rows + 1) * (end + 1))

    def number_calls(events: NDArray[np.int64], side: Literal["left", "right"]) -> Events:
        row, step, position = events[:, np.lexsort(events[::-1])]
        return Events(np.searchsorted(calls, row * (end + 1) + step, side) - first_call[row], row, position, step)

    return (
        number_calls(reveals, "left"),
        number_calls(remasks[:, remasks[1] < end], "right"),
        np.diff(first_call),
    )


def _cumulative_hazard(probability: Tensor) -> NDArray[np.float64]:
    """(K + 1,), -log P(no change before each step); a step that changes with certainty adds CERTAIN_HAZARD."""
    return np.concatenate([[0.0], torch.log1p(-probability).neg().clamp(max=CERTAIN_HAZARD).cumsum(dim=0).numpy()])


def _first_step(
    hazard: NDArray[np.float64], start: NDArray[np.int64], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The first step from `start` on at which a change happens, K if none does; one uniform number each.

    By inversion: P(no change from step `start` to k) = exp(-(hazard[k + 1] - hazard[start])).
    """
    return np.searchsorted(hazard[1:], hazard[start] - np.log1p(-uniforms), side="right")


def _token_uniforms(reveals: Events, rng: RowRng) -> NDArray[np.float64]:
    """(R,), a uniform number for every reveal, from its row's token stream in the order of the row's reveals."""
    counts = np.bincount(reveals.row, minlength=len(rng))
    return np.concatenate([rng.for_tokens(row, int(count)) for row, count in enumerate(counts)])


@dataclass(frozen=True)
class PositionsFirst(Iterator[Frame]):
    """The frames of a positions-first run; `JoinedRows` takes the run itself and samples its row among others."""

    run: SamplingRun
    frames: Iterator[Frame]

    def __next__(self) -> Frame:
        return next(self.frames)


def sample_positions_first(run: SamplingRun) -> PositionsFirst:
    """From the canvas (B, L) to text, one Frame per network call; the first Frame is the canvas.

    Tokens given on the canvas stay. The host never waits for the device: all it needs is drawn beforehand.
    """
    return PositionsFirst(run, _frames(run))


def _frames(run: SamplingRun) -> Iterator[Frame]:
    canvas, mask_id = run.canvas, run.mask_id
    yield first_frame(canvas, mask_id)
    plan = plan_events(run.steps, canvas == mask_id, run.rng)
    order, host_inverse = plan.order.to(canvas.device), plan.order.argsort()
    inverse = host_inverse.to(canvas.device)
    z, chance = canvas[order], (canvas != mask_id).float()[order]
    pad = None if run.pad is None else run.pad[order]
    for call in plan.calls:
        z.view(-1).index_fill_(0, call.remasked, mask_id)
        read = z[inverse]
        num_rows = _padded_num_rows(call.num_rows, len(z))
        output = run.denoiser(z[:num_rows], call.alpha[:num_rows], None if pad is None else pad[:num_rows])
        log_beliefs = output.log_beliefs(call.revealed)
        drawn = draw_tokens(log_beliefs, z, call.revealed, call.uniforms, run.sampling, pad)
        if call.is_final is not None and run.sampling.final == "argmax":
            drawn = drawn.with_argmax(call.is_final, log_beliefs)
        z.view(-1).index_copy_(0, call.revealed, drawn.tokens)
        chance.view(-1).index_fill_(0, call.remasked, 0.0).index_copy_(0, call.revealed, drawn.chance)
        revealed, remasked = (_as_mask(z, positions)[inverse] for positions in (call.revealed, call.remasked))
        t, alpha = call.t[host_inverse], call.alpha[host_inverse]
        yield Frame(z[inverse], t, revealed, remasked, chance[inverse], read, alpha)


def _padded_num_rows(num_needed: int, num_rows: int) -> int:
    """The batch size halved while the needed rows fit: the device sees few shapes, and surplus rows cost little."""
    while (num_rows + 1) // 2 >= num_needed and num_rows > 1:
        num_rows = (num_rows + 1) // 2
    return num_rows


def _as_mask(z: Tensor, positions: Tensor) -> Tensor:
    """(B, L), True at the flat positions."""
    return torch.zeros(z.numel(), dtype=torch.bool, device=z.device).index_fill_(0, positions, True).view(z.shape)
