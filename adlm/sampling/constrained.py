"""Tokens of constrained holes, drawn from the product of the beliefs given the constraint, jointly in each hole.

A step conditions the beliefs at all masks of a hole and reveals some of them: their tokens are drawn from their exact
joint distribution, with the uniform numbers that would otherwise have drawn them one by one. So whatever a step reveals
or remasks, the tokens of a hole are part of a text that satisfies its constraint. Of a hole that ends after the canvas,
as in text that is written block by block, the places on the canvas are part of a text that does.

The repetition penalty and the temperature change the beliefs before they are conditioned. Temperature 0, and
`sampling.final` argmax in the last call, take the likeliest sequence. top_k and top_p apply to the conditioned marginal
of each mask: a second conditioning allows only the tokens that they keep and, so that one sequence always remains,
those of the likeliest one.

Holes of one name have the same tokens: the belief in a token is the product of those at their masks.

On a GPU, holes whose beliefs are not shaped are drawn together by kernels. A sampler that knows the positions
beforehand then waits for the device only in the last call of a row. Beliefs that are not finite are no error there, but
give chances that are not finite.

Shapes: B rows, L positions, N of them to draw, n of these in a hole of P places, of which M are masked; V symbols;
K holes of one name. Positions are flat: row * L + position.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.constraints.automaton import Ints
from adlm.constraints.conditioning import Conditioned, condition
from adlm.constraints.holes import Bools, ConstrainedHole, HoleAutomaton
from adlm.constraints.together import draw_together, fits
from adlm.errors import UserError
from adlm.sampling.frame import NOT_FINITE, DenoiserOutput, SamplingRun
from adlm.sampling.rng import categorical, has_kernels
from adlm.sampling.shaping import DrawnTokens, seen_symbols, shape, visible_ids, without_repeats

MAX_POSITIONS = 4096
"""Positions whose beliefs are held at once: with 50,000 symbols they take 0.8 GB."""


@dataclass(frozen=True)
class HoleStep:
    """A hole of which a step reveals something."""

    run: SamplingRun
    ids: Tensor
    """(P,), masks where no hole of the name has a token; on the host."""
    log_beliefs: Tensor
    """(M, V), at its masks."""
    seen: Tensor | None
    """(M, V), True at the symbols that the repetition penalty applies to; None if there is none."""
    index: Tensor
    """(n,), which of the N positions are in the hole."""
    place: Tensor
    """(n,), the place of each; on the host."""
    conditioned: Conditioned | None
    """The beliefs given the constraint; None without masks."""

    def draw(self, uniforms: Tensor) -> DrawnTokens:
        """The n tokens, from as many uniform numbers, with the probability of each given those drawn before it."""
        if (shaped := self._shaped()) is None:
            return self._at_positions(torch.zeros(0), torch.zeros(0))
        if self.run.sampling.temperature == 0:
            return self._at_positions(shaped.likeliest, torch.ones(len(shaped.likeliest)))
        of_place = torch.zeros(len(self.ids), dtype=torch.float64).index_copy(0, self.place, uniforms.cpu().double())
        drawn = torch.zeros(len(self.ids), dtype=torch.bool).index_fill(0, self.place, True)[self._is_masked]
        tokens, chance = shaped.draw(drawn, of_place[self._is_masked][drawn], categorical)
        return self._at_positions(tokens, chance, drawn)

    def argmax(self) -> DrawnTokens:
        """The n tokens of the likeliest sequence, with their conditioned marginals."""
        if self.conditioned is None:
            return self._at_positions(torch.zeros(0), torch.zeros(0))
        tokens = self.conditioned.likeliest
        return self._at_positions(tokens, self.conditioned.log_marginals.gather(1, tokens[:, None])[:, 0].exp())

    def log_marginals(self, tokens: Tensor) -> Tensor:
        """(n, V), conditioned, at the positions where `tokens` were drawn; certain where the token is known already."""
        known = self.log_beliefs.new_full((len(tokens), self.log_beliefs.shape[1]), -torch.inf, dtype=torch.float64)
        known = known.scatter(1, tokens[:, None], 0.0)
        if self.conditioned is None:
            return known
        number = (self._is_masked.cumsum(0) - 1)[self.place].clamp(min=0).to(known.device)
        is_masked = self._is_masked[self.place].to(known.device)
        return torch.where(is_masked[:, None], self.conditioned.log_marginals[number], known)

    @property
    def _is_masked(self) -> Tensor:
        return self.ids == self.run.mask_id

    def _at_positions(self, tokens: Tensor, chance: Tensor, drawn: Tensor | None = None) -> DrawnTokens:
        """Those of all masks (M,), or of drawn ones, at the n positions; of a token that is known already, itself."""
        where = self._is_masked.nonzero()[:, 0]
        where = where if drawn is None else where[drawn]
        all_tokens = self.ids.index_copy(0, where, tokens.cpu().to(self.ids))
        all_chances = torch.ones(len(self.ids)).index_copy(0, where, chance.cpu().float())
        device = self.log_beliefs.device
        return DrawnTokens(all_tokens[self.place].to(device), all_chances[self.place].to(device))

    def _shaped(self) -> Conditioned | None:
        """The distribution after repetition penalty, temperature, top-k and nucleus."""
        sampling, log_beliefs, conditioned = self.run.sampling, self.log_beliefs, self.conditioned
        if conditioned is None:
            return None
        if self.seen is not None or sampling.temperature not in (0, 1):
            log_beliefs = log_beliefs.double()
            if self.seen is not None:
                log_beliefs = torch.where(self.seen, log_beliefs * sampling.repetition_penalty, log_beliefs)
            log_beliefs = log_beliefs / (sampling.temperature or 1.0)
            conditioned = condition(log_beliefs, conditioned.automaton, self.ids, self.run.mask_id)
        if sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1):
            kept = shape(conditioned.log_marginals_of_text, replace(sampling, temperature=1.0)) > 0
            kept = kept.scatter(1, conditioned.likeliest[:, None], True)
            log_beliefs = log_beliefs.masked_fill(~kept, -torch.inf)
            conditioned = condition(log_beliefs, conditioned.automaton, self.ids, self.run.mask_id)
        return conditioned


class HolesOfCanvas:
    """Where the constrained holes of a canvas are; everything is on the host."""

    def __init__(self, holes: Sequence[ConstrainedHole], num_rows: int, length: int):
        self.holes = holes
        self.hole_at, self.place_at = np.full((2, num_rows * length), -1)
        """(B * L,), the number of the hole that a position is in, -1 if it is in none; and its place there."""
        self.alike: list[Alike] = []
        """Holes that are drawn together, where the device can."""
        self.group_at, self.member_at = np.full((2, num_rows * length), -1)
        """(B * L,), the number of that hole's group, -1 if it is in none; and which of the group it is."""
        groups: dict[tuple[HoleAutomaton, int, int], list[int]] = {}
        for number, hole in enumerate(holes):
            num_places = min(hole.automaton.num_places, length - max(hole.starts))
            if num_places <= 0:
                continue  # after the canvas
            for start in hole.starts:
                own = slice(hole.row * length + start, hole.row * length + start + num_places)
                self.hole_at[own], self.place_at[own] = number, np.arange(num_places)
            if fits(hole.automaton):
                groups.setdefault((hole.automaton, len(hole.starts), num_places), []).append(number)
        for (automaton, _, num_places), numbers in groups.items():
            starts = np.array([[holes[each].row * length + start for start in holes[each].starts] for each in numbers])
            at = starts[:, :, None] + np.arange(num_places)
            self.group_at[at] = len(self.alike)
            self.member_at[at] = np.arange(len(at))[:, None, None]
            self.alike.append(Alike(automaton, at))

    def touched(self, positions: Ints, left_out: Bools | bool = False) -> Iterator["Touched"]:
        """The holes that have some of the positions (N,), not counting those where `left_out` (N,) is True."""
        hole_of = np.where(left_out, -1, self.hole_at[positions])
        for number in np.unique(hole_of[hole_of >= 0]).tolist():
            [index] = (hole_of == number).nonzero()
            place = torch.from_numpy(self.place_at[positions[index]])
            yield Touched(self.holes[number], place, torch.from_numpy(index))


@dataclass(frozen=True, eq=False)
class Alike:
    """H holes with one automaton, as many of their name, and as many places on the canvas."""

    automaton: HoleAutomaton
    at: Ints
    """(H, K, P), their positions."""

    def parts(self, member: Ints) -> Iterator[Bools]:
        """(n,), which of n positions are drawn at once, given the hole of each.

        They are those of at least one hole, and of more if these have at most MAX_POSITIONS places together.
        """
        num_at_once = max(1, MAX_POSITIONS // self.at[0].size)
        numbers, number = np.unique(member, return_inverse=True)
        for first in range(0, len(numbers), num_at_once):
            yield (first <= number) & (number < first + num_at_once)


@dataclass(frozen=True)
class OnHost:
    """What the host knows of a call without asking the device."""

    holes: HolesOfCanvas
    positions: Ints
    """(N,), those to draw."""
    is_masked: Tensor
    """(B, L), before the call."""

    @property
    def all_in_holes(self) -> bool:
        return bool((self.holes.hole_at[self.positions] >= 0).all())

    @classmethod
    def of_call(cls, holes: HolesOfCanvas, is_masked: Tensor, remasked: Tensor, revealed: Tensor) -> "OnHost":
        """`is_masked` (B, L) is that after the call before, and is brought up to date for the next one."""
        flat = is_masked.view(-1)
        flat[remasked] = True
        before = is_masked.clone()
        flat[revealed] = False
        return cls(holes, revealed.numpy(), before)

    @classmethod
    def of(cls, run: SamplingRun, z: Tensor, positions: Tensor) -> "OnHost":
        """Waits for the device."""
        return cls(HolesOfCanvas(run.holes, *z.shape), positions.cpu().numpy(), (z == run.mask_id).cpu())


@dataclass(frozen=True)
class Touched:
    """A hole with some of the positions to draw."""

    hole: ConstrainedHole
    place: Tensor
    """(n,), the place of each; on the host, as all of this."""
    index: Tensor
    """(n,), which of the N positions they are."""


def hole_steps(run: SamplingRun, output: DenoiserOutput, z: Tensor, touched: Sequence[Touched]) -> Iterator[HoleStep]:
    """The steps of holes on z (B, L)."""
    if touched:
        rows = z.cpu()
        for each in touched:
            yield _hole_step(run, output, z, each, rows[each.hole.row])


def _hole_step(run: SamplingRun, output: DenoiserOutput, z: Tensor, touched: Touched, row: Tensor) -> HoleStep:
    """`row` (L,) is on the host."""
    hole = touched.hole
    ids = hole.ids(row, run.mask_id)
    is_masked = ids == run.mask_id
    at_masks = (hole.row * z.shape[1] + torch.tensor(hole.starts)[:, None] + is_masked.nonzero()[:, 0]).to(z.device)
    log_beliefs = output.log_beliefs(at_masks.flatten())
    log_beliefs = log_beliefs.view(*at_masks.shape, log_beliefs.shape[1]).sum(dim=0)
    seen, conditioned = None, None
    if run.sampling.repetition_penalty > 1:
        seen = seen_symbols(visible_ids(z, run.pad), at_masks[0], log_beliefs.shape[1])
    if is_masked.any():
        conditioned = condition(log_beliefs, hole.automaton, ids, run.mask_id)
        if not math.isfinite(conditioned.log_mass):
            raise UserError(NOT_FINITE)
    return HoleStep(run, ids, log_beliefs, seen, touched.index.to(z.device), touched.place, conditioned)


def draw_in_holes(
    run: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    positions: Tensor,
    uniforms: Tensor,
    drawn: DrawnTokens,
    is_final: Tensor | None,
    on_host: OnHost | None = None,
) -> DrawnTokens:
    """`drawn` with the tokens in constrained holes replaced, for positions (N,) of z (B, L), one uniform number each.

    `is_final` (N,) is True in rows that make their last call; None if none does.
    """
    on_host = on_host or OnHost.of(run, z, positions)
    takes_argmax = np.zeros(len(positions), dtype=bool)
    if is_final is not None and run.sampling.final == "argmax":
        takes_argmax = is_final.cpu().numpy()
    holes, together = on_host.holes, np.zeros(len(positions), dtype=bool)
    if has_kernels(uniforms) and not _shapes(run.sampling):
        together = (holes.group_at[on_host.positions] >= 0) & ~takes_argmax
    for number, group in enumerate(holes.alike):
        [index] = (together & (holes.group_at[on_host.positions] == number)).nonzero()
        for part in group.parts(holes.member_at[on_host.positions[index]]):
            drawn = _draw_alike(run, output, z, group, index[part], uniforms, drawn, on_host)
    for hole in hole_steps(run, output, z, [*holes.touched(on_host.positions, together)]):
        own = hole.argmax() if takes_argmax[hole.index[0]] else hole.draw(uniforms[hole.index])
        drawn = drawn.with_tokens(hole.index, own)
    return drawn


def _shapes(sampling: Sampling) -> bool:
    """Whether the options change beliefs."""
    return sampling.temperature != 1 or sampling.top_k > 0 or sampling.top_p < 1 or sampling.repetition_penalty > 1


def _draw_alike(
    run: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    group: Alike,
    index: Ints,
    uniforms: Tensor,
    drawn: DrawnTokens,
    on_host: OnHost,
) -> DrawnTokens:
    """`drawn` with the tokens at positions `index` (n,) in a group of holes replaced. Does not wait for the device."""
    positions = on_host.positions
    member = on_host.holes.member_at[positions[index]]
    is_touched = np.zeros(len(group.at), dtype=bool)
    is_touched[member] = True
    at, row = group.at[is_touched], (is_touched.cumsum() - 1)[member]
    num_holes, num_alike, num_places = at.shape
    is_masked = on_host.is_masked.flatten().numpy()[at].all(axis=1)
    slots = np.where(is_masked, is_masked.cumsum().reshape(is_masked.shape) - 1, -1)
    where = row * num_places + on_host.holes.place_at[positions[index]]
    uniform_of = np.full(num_holes * num_places, -1)
    uniform_of[where] = index  # of positions of one name, one of them
    uniform_of[~is_masked.ravel()] = -1  # known already from another hole of the name
    [to_draw] = (uniform_of >= 0).nonzero()
    last = np.full(num_holes, -1)
    last[to_draw // num_places] = to_draw % num_places  # ascending
    parts = at, at.transpose(1, 0, 2)[:, is_masked], slots, where, index, uniform_of, to_draw, last
    at_places, at_masks, slot, flat, index_of, uniform_at, drawn_at, last_drawn = _to_device(parts, z.device)
    ids, log_beliefs = z.flatten()[at_places], output.log_beliefs(at_masks.flatten())
    if num_alike > 1:
        ids = ids.masked_fill(ids == run.mask_id, -1).amax(dim=1, keepdim=True).clamp(min=0)
        log_beliefs = log_beliefs.view(*at_masks.shape, log_beliefs.shape[1]).sum(dim=0)
    tokens, chance = draw_together(
        log_beliefs, group.automaton, ids[:, 0], slot, uniforms.double(), uniform_at, drawn_at, last_drawn
    )
    return drawn.with_tokens(index_of, DrawnTokens(tokens.flatten()[flat], chance.flatten()[flat]))


def _to_device(parts: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Copied together, without waiting, each to a multiple of 16 bytes: kernels are compiled for one alignment."""
    sizes = [part.size + part.size % 2 for part in parts]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    views = torch.split(packed, sizes)
    for view, part in zip(views, parts, strict=True):
        view.numpy()[: part.size] = part.ravel()
    copies = torch.split(packed.to(device, non_blocking=True), sizes)
    return [copy[: part.size].view(part.shape) for copy, part in zip(copies, parts, strict=True)]


class NextTokens:
    """The constraints on the next token of each row, for models that write a token at a time. Where there is none, no
    sequence of `no_repeat` tokens is written again."""

    def __init__(self, holes: Sequence[ConstrainedHole], no_repeat: int, mask_id: int, pad: Tensor | None):
        self.holes, self.no_repeat, self.mask_id = holes, no_repeat, mask_id
        self.pad = None if pad is None else pad.cpu()
        self._reached = [(0, 0)] * len(holes)
        """Of each hole, the places that have a token and the state after them."""

    def __call__(self, log_p: Tensor, ids: Tensor, known: Tensor) -> Tensor:
        """log beliefs (B, V) in the tokens at positions `known` (B,) of ids (B, L), given the constraints on them."""
        positions, rows = known.tolist(), ids.cpu()
        log_p = log_p.clone()  # may be overwritten by the next call
        free = {row for row, position in enumerate(positions) if position < ids.shape[1]}
        for number, hole in enumerate(self.holes):
            place = positions[hole.row] - hole.starts[0]
            if 0 <= place < hole.automaton.num_places:
                done, state = self._reached[number]
                new = rows[hole.row, hole.starts[0] + done : positions[hole.row]].tolist()
                self._reached[number] = place, hole.automaton.walk(new, state)
                allowed = torch.from_numpy(hole.automaton.allowed(place, self._reached[number][1], log_p.shape[1]))
                row = log_p[hole.row].masked_fill(~allowed.to(log_p.device), -torch.inf)
                log_p[hole.row] = row.log_softmax(dim=0)
                free.discard(hole.row)
        if self.no_repeat and free:
            where = torch.tensor(sorted(free))
            flat = where * ids.shape[1] + known.cpu()[where]
            own = where.to(log_p.device)
            log_p[own] = without_repeats(log_p[own], rows, flat, self.mask_id, self.no_repeat, self.pad)
        return log_p
