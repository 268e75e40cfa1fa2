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

Shapes: B rows, L positions, N of them to draw, n of these in a hole of P places, of which M are masked; V symbols.
Positions are flat: row * L + position.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adlm.constraints.conditioning import Conditioned, condition
from adlm.constraints.holes import ConstrainedHole
from adlm.errors import UserError
from adlm.sampling.frame import NOT_FINITE, DenoiserOutput, SamplingRun
from adlm.sampling.rng import categorical
from adlm.sampling.shaping import DrawnTokens, seen_symbols, shape, visible_ids, without_repeats


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


def hole_steps(run: SamplingRun, output: DenoiserOutput, z: Tensor, positions: Tensor) -> Iterator[HoleStep]:
    """The constrained holes of the run in which positions (N,) of z (B, L), ascending in each row, are revealed."""
    rows, length, host_positions = z.cpu(), z.shape[1], positions.cpu()
    of_row: dict[int, list[int]] = {}  # which of the positions are in each row
    for index, row in enumerate((host_positions // length).tolist()):
        of_row.setdefault(row, []).append(index)
    for hole in run.holes:
        if (some := of_row.get(hole.row)) is not None:
            inside = torch.tensor(some)
            places = host_positions[inside] - hole.row * length
            if (step := _hole_step(run, output, z, hole, rows[hole.row], places, inside)) is not None:
                yield step


def _hole_step(
    run: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    hole: ConstrainedHole,
    row: Tensor,
    positions: Tensor,
    index_of: Tensor,
) -> HoleStep | None:
    """`row` (L,) and the positions in it to draw, which are `index_of` of all, on the host."""
    length, starts = z.shape[1], torch.tensor(hole.starts)[:, None]
    place = positions - starts  # (holes of the name, n)
    copy, index = ((place >= 0) & (place < hole.automaton.num_places)).nonzero().unbind(1)
    if len(index) == 0:
        return None
    ids = hole.ids(row, run.mask_id)
    is_masked = ids == run.mask_id
    at_masks = (hole.row * length + starts + is_masked.nonzero()[:, 0]).to(z.device)
    log_beliefs = output.log_beliefs(at_masks.flatten())
    log_beliefs = log_beliefs.view(*at_masks.shape, log_beliefs.shape[1]).sum(dim=0)
    seen, conditioned = None, None
    if run.sampling.repetition_penalty > 1:
        seen = seen_symbols(visible_ids(z, run.pad), at_masks[0], log_beliefs.shape[1])
    if is_masked.any():
        conditioned = condition(log_beliefs, hole.automaton, ids, run.mask_id)
        if not math.isfinite(conditioned.log_mass):
            raise UserError(NOT_FINITE)
    return HoleStep(run, ids, log_beliefs, seen, index_of[index].to(z.device), place[copy, index], conditioned)


def draw_in_holes(
    run: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    positions: Tensor,
    uniforms: Tensor,
    drawn: DrawnTokens,
    is_final: Tensor | None,
) -> DrawnTokens:
    """`drawn` with the tokens in constrained holes replaced, for positions (N,) of z (B, L), one uniform number each.

    `is_final` (N,) is True in rows that make their last call; None if none does.
    """
    for hole in hole_steps(run, output, z, positions):
        takes_argmax = run.sampling.final == "argmax" and is_final is not None and bool(is_final[hole.index[0]])
        drawn = drawn.with_tokens(hole.index, hole.argmax() if takes_argmax else hole.draw(uniforms[hole.index]))
    return drawn


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
