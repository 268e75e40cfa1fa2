"""Positions-first sampling: the steps at which positions change are drawn before the network is called.

A masked position is revealed with a probability that depends on the step alone, and a visible one is remasked likewise.
The set of masked positions is therefore a Markov chain of its own: a step that reveals nothing needs no network call,
and the head runs only at the revealed positions. Rows are independent: each advances from one of its reveals to the
next, and network call c reads every row just before its own c-th reveal. `JoinedRows` samples rows that join and leave
between network calls.

Shapes: B rows, L positions, K steps, C calls, R reveals in all, N revealed in one call, V symbols, S slots. Positions
are flat: row * L + position, or slot * L + position.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.ma  # np.unique would import it during the first run, where Ctrl-C must find no import
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.sampling.constrained import HolesOfCanvas, OnHost, draw_in_holes
from adlm.sampling.frame import DenoiserOutput, Frame, NoisyRows, SamplingRun, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens, draw_tokens
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
    step: Tensor
    """(B,), the step at which each row makes this call; unused from row `num_rows` on."""
    on_host: tuple[Tensor, Tensor]
    """`remasked` and `revealed` on the host."""


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
        return torch.from_numpy(values[np.argsort(events.call, kind="stable")])

    def ends_of_calls(events: Events) -> NDArray[np.int64]:
        return np.concatenate([[0], np.bincount(events.call, minlength=max_calls).cumsum()])

    changed = [sort_by_call(events, rank[events.row] * length + events.position) for events in (remasks, reveals)]
    remasked, revealed = (positions.to(to_fill.device) for positions in changed)
    remask_ends, reveal_ends = ends_of_calls(remasks), ends_of_calls(reveals)
    counts = np.bincount(reveals.row, minlength=num_rows)
    token_uniforms = np.concatenate([rng.for_tokens(row, int(count)) for row, count in enumerate(counts)])
    uniforms, final = (sort_by_call(reveals, values).to(to_fill.device) for values in (token_uniforms, is_final))
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
                step,
                (changed[0][remasks_here], changed[1][reveals_here]),
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
        # The first step after `step` with a change, K if none has one, by inversion:
        # P(no change in steps i to k) = exp(-(hazard[k + 1] - hazard[i])).
        step = np.searchsorted(hazard[1:], hazard[step + 1] - np.log1p(-uniforms), side="right")
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


@dataclass(frozen=True)
class PositionsFirst(Iterator[Frame]):
    """The frames of a positions-first run; `JoinedRows` takes the run itself and samples its row among others."""

    run: SamplingRun
    frames: Iterator[Frame]

    def __next__(self) -> Frame:
        return next(self.frames)


def sample_positions_first(run: SamplingRun) -> PositionsFirst:
    """From the canvas (B, L) to text, one Frame per network call; the first Frame is the canvas.

    Tokens given on the canvas stay. The host never waits for the device: all it needs is drawn beforehand. With
    `run.text`, its tokens take the place of drawn ones; when they are revealed is drawn as ever.
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
    reached = torch.zeros(len(z), dtype=torch.int64)
    in_order = tuple(replace(hole, row=int(host_inverse[hole.row])) for hole in run.holes)
    holes, is_masked = HolesOfCanvas(in_order, *z.shape), (canvas == mask_id).cpu()[plan.order]
    run = replace(run, pad=pad, holes=in_order)
    for call in plan.calls:
        z.view(-1).index_fill_(0, call.remasked, mask_id)
        read = z[inverse]
        num_rows = padded_num_rows(call.num_rows, len(z))
        padding = None if pad is None else pad[:num_rows]
        reached = torch.cat([call.step[: call.num_rows], reached[call.num_rows :]])  # complete rows go no further
        noisy = NoisyRows(z[:num_rows], call.alpha[:num_rows], padding, order[:num_rows], reached[:num_rows])
        output = run.denoiser(noisy)
        if run.holes:
            on_host = OnHost.of_call(holes, is_masked, *call.on_host)
            drawn = _no_tokens(call.revealed) if on_host.all_in_holes else _draw_freely(run, output, z, call, order)
            drawn = draw_in_holes(run, output, z, call.revealed, call.uniforms, drawn, call.is_final, on_host)
        else:
            drawn = _draw_freely(run, output, z, call, order)
        z.view(-1).index_copy_(0, call.revealed, drawn.tokens)
        chance.view(-1).index_fill_(0, call.remasked, 0.0).index_copy_(0, call.revealed, drawn.chance)
        revealed, remasked = (_as_mask(z, positions)[inverse] for positions in (call.revealed, call.remasked))
        t, alpha = call.t[host_inverse], call.alpha[host_inverse]
        yield Frame(z[inverse], t, revealed, remasked, chance[inverse], read, alpha)


def _draw_freely(run: SamplingRun, output: DenoiserOutput, z: Tensor, call: NetworkCall, order: Tensor) -> DrawnTokens:
    """The tokens that a call reveals, without constraints."""
    log_beliefs = output.log_beliefs(call.revealed)
    if run.text is None:
        drawn = draw_tokens(log_beliefs, z, call.revealed, call.uniforms, run.sampling, run.mask_id, run.pad)
    else:
        drawn = run.text.reveal(log_beliefs, z, call.revealed, order)
    if call.is_final is not None and run.sampling.final == "argmax":
        drawn = drawn.with_argmax(call.is_final, log_beliefs)
    return drawn


def _no_tokens(positions: Tensor) -> DrawnTokens:
    """Tokens of no meaning, all of which are replaced by those drawn in holes: they cost no call of the head."""
    return DrawnTokens(torch.zeros_like(positions), torch.zeros(len(positions), device=positions.device))


def padded_num_rows(num_needed: int, num_rows: int) -> int:
    """The batch size halved while the needed rows fit: the device sees few shapes, and surplus rows cost little."""
    while (num_rows + 1) // 2 >= num_needed and num_rows > 1:
        num_rows = (num_rows + 1) // 2
    return num_rows


def _as_mask(z: Tensor, positions: Tensor) -> Tensor:
    """(B, L), True at the flat positions."""
    return torch.zeros(z.numel(), dtype=torch.bool, device=z.device).index_fill_(0, positions, True).view(z.shape)


@dataclass(eq=False)
class JoinedRow:
    """A row among others."""

    slot: int
    sampling: Sampling
    calls: Iterator[NetworkCall]
    """The network calls still to make, planned for this row alone."""
    num_calls: int
    """How many they are."""
    holes: tuple[ConstrainedHole, ...]
    """Those of the row, whose text is constrained."""


class JoinedRows:
    """Rows that are sampled together, each with its own steps, options and RNG, and with its own beginning and end.

    One network call serves the next reveals of some of them, and the others wait. All have the length, denoiser and
    mask of the run `like`. The plain form is `sample_positions_first` of each row alone: with a network of fixed batch
    (`FrozenNetwork`) both give the same bits.

    Two rows of three tokens, `_` masked. The plan of each row is its own: x reveals positions 1 and then 0 and 2,
    y reveals 2, then 0, and then 1.

        join(x)         slot 0: _ _ _                         x has 2 calls left
        step([x])       slot 0: _ b _                         call 1 of x; y is not there yet
        join(y)         slot 0: _ b _   slot 1: _ _ _         y has 3 calls left
        step([x, y])    slot 0: a b c   slot 1: _ _ f         one network call: call 2 of x, call 1 of y
        leave(x)        slot 0: free    slot 1: _ _ f         x is complete; the next row that joins takes its slot
        step([y])                       slot 1: d _ f         call 2 of y, in a batch of one

    In step([x, y]) the network reads z = slots [0, 1], and y's position 2 is flat position 1 * 3 + 2 = 5 of z and of
    the slots. In step([y]) z = slot [1], and y's position 0 is position 0 of z and position 1 * 3 + 0 = 3 of the slots.
    """

    def __init__(self, like: SamplingRun):
        self._like, self._denoiser, self._mask_id = like, like.denoiser, like.mask_id
        self._ids = like.canvas[:0]
        self._pad = torch.zeros_like(self._ids, dtype=torch.bool)
        self._chance = torch.zeros_like(self._ids, dtype=torch.float32)
        self._free: list[int] = []

    def join(self, run: SamplingRun) -> JoinedRow:
        """Add the row of a run (1, L)."""
        if not self._free:
            num_slots = len(self._ids)
            self._free += range(num_slots, max(1, 2 * num_slots))
            for name in ("_ids", "_pad", "_chance"):
                rows = getattr(self, name)
                setattr(self, name, torch.cat([rows, rows.new_zeros(len(self._free), rows.shape[1])]))
        [canvas], to_fill = run.canvas, (run.canvas == run.mask_id).cpu()
        plan = plan_events(run.steps, to_fill, run.rng)
        row = JoinedRow(self._free.pop(), run.sampling, plan.calls, plan.num_calls, run.holes)
        self._ids[row.slot], self._chance[row.slot] = canvas, (canvas != run.mask_id).float()
        self._pad[row.slot] = False if run.pad is None else run.pad[0]
        return row

    def leave(self, row: JoinedRow) -> None:
        """Free the slot of a row, complete or not."""
        self._free.append(row.slot)

    def step(self, rows: Sequence[JoinedRow]) -> tuple[Tensor, Tensor]:
        """One network call for these rows, each of which has calls left.

        The result, on the CPU, is (B, L) each: ids, with masks where nothing is revealed, and the probabilities of
        tokens when they were drawn. It is of all rows at once, because every copy from a GPU waits for it.
        """
        calls = []
        for row in rows:
            calls.append(next(row.calls))
            row.num_calls -= 1
        length, device, numbers = self._ids.shape[1], self._ids.device, [row.slot for row in rows]
        slots = torch.tensor(numbers, device=device)

        def flat(firsts: Iterable[int], positions: Iterable[Tensor]) -> Tensor:
            return torch.cat([first * length + own for first, own in zip(firsts, positions, strict=True)]).to(device)

        self._ids.view(-1).index_fill_(0, flat(numbers, (call.remasked for call in calls)), self._mask_id)
        z, pad = self._ids[slots], self._pad[slots]
        revealed = flat(numbers, (call.revealed for call in calls))
        revealed_in_z = flat(range(len(rows)), (call.revealed for call in calls))
        output = self._denoiser(NoisyRows(z, torch.cat([call.alpha for call in calls]), pad))
        drawn = _draw(replace(self._like, pad=pad), output, z, revealed_in_z, rows, calls)
        self._ids.view(-1).index_copy_(0, revealed, drawn.tokens)
        self._chance.view(-1).index_copy_(0, revealed, drawn.chance)
        return self._ids[slots].cpu(), self._chance[slots].cpu()


def _draw(
    like: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    revealed: Tensor,
    rows: Sequence[JoinedRow],
    calls: Sequence[NetworkCall],
) -> DrawnTokens:
    """The tokens (N,) at the revealed positions of z (B, L); those of rows with equal options are drawn together."""
    device, num_tokens = revealed.device, [len(call.revealed) for call in calls]
    log_beliefs = output.log_beliefs(revealed)
    options = list(dict.fromkeys(row.sampling for row in rows))
    option_of_row = [options.index(row.sampling) for row in rows]
    options_of_token = torch.tensor(option_of_row).repeat_interleave(torch.tensor(num_tokens))
    uniforms = torch.cat([call.uniforms for call in calls])
    is_final = torch.cat(
        [
            torch.zeros(num, dtype=torch.bool) if call.is_final is None else call.is_final
            for num, call in zip(num_tokens, calls, strict=True)
        ]
    )
    drawn = DrawnTokens(torch.empty_like(revealed), torch.empty(len(revealed), device=device))
    for number, sampling in enumerate(options):
        index = (options_of_token == number).nonzero()[:, 0]
        where, own_uniforms, own_final = index.to(device), uniforms[index].to(device), is_final[index]
        beliefs = log_beliefs[where]
        own = draw_tokens(beliefs, z, revealed[where], own_uniforms, sampling, like.mask_id, like.pad)
        if sampling.final == "argmax" and own_final.any():
            own = own.with_argmax(own_final.to(device), beliefs)
        drawn = drawn.with_tokens(where, own)
        holes = tuple(
            replace(hole, row=place)
            for place, row in enumerate(rows)
            if option_of_row[place] == number
            for hole in row.holes
        )
        if holes:
            run = replace(like, sampling=sampling, holes=holes)
            drawn = draw_in_holes(run, output, z, revealed, uniforms.to(device), drawn, is_final)
    return drawn
