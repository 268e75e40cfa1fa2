"""Automata over the tokens of a hole, and where the hole is. Independent of how constraints are written.

A hole of P places has exactly P tokens or, if an end token may end it, at most P: the end token, then anything. What
follows the end is no part of the text.

Shapes: V symbols, C classes of tokens, S states, P places of a hole, E transitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.constraints.automaton import Ints, TokenAutomaton

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Groups:
    """Values in groups, such as those of transitions from the same state, to be reduced group by group."""

    order: Ints
    """(E,), the values of one group after those of another."""
    starts: Ints
    """(G,), where each group begins in this order."""
    index: Ints
    """(G,), the index of the group's result."""
    size: int
    """Of the result: groups without values are -inf."""

    @classmethod
    def of(cls, keys: Ints, size: int) -> "Groups":
        order = np.argsort(keys, kind="stable")
        index, starts = np.unique(keys[order], return_index=True)
        return cls(order, starts, index, size)

    def max(self, values: Floats) -> Floats:
        found = np.full(self.size, -np.inf)
        found[self.index] = np.maximum.reduceat(values[self.order], self.starts)
        return found

    def logsumexp(self, values: Floats) -> Floats:
        """log of the sum of exp of each group."""
        peak = self.max(values)
        shift = np.where(np.isneginf(peak), 0.0, peak)  # -inf cannot be subtracted
        ordered, counts = values[self.order], np.diff(self.starts, append=len(self.order))
        sums = np.add.reduceat(np.exp(ordered - shift[self.index].repeat(counts)), self.starts)
        with np.errstate(divide="ignore"):
            peak[self.index] = np.log(sums) + shift[self.index]
        return peak


@dataclass(frozen=True, eq=False)
class Edges:
    """The transitions of one place of a hole, E of them, that the places before reach and those after can end."""

    source: Ints
    """(E,), the state before the token."""
    number: Ints
    """(E,), the class of the token."""
    target: Ints
    """(E,), the state after it."""
    num_states: int

    @cached_property
    def by_source(self) -> Groups:
        return Groups.of(self.source, self.num_states)


@dataclass(frozen=True, eq=False)
class HoleAutomaton:
    """Accepts what may be in a hole of P places; there is at least one such text. State 0 is the start.

    With an `end_id`, there is one more state, END, the last one, and there are two more classes: the end token, which
    leads from a final state to END, and what follows it, which stays there.
    """

    tokens: TokenAutomaton
    alive: Bools
    """(P + 1, S), the states before each place and at the end that the places before reach and those after can end."""
    end_id: int | None = None
    least: int = 0
    """Of a hole with an end, the fewest tokens before it."""

    @property
    def num_places(self) -> int:
        return len(self.alive) - 1

    @property
    def num_classes(self) -> int:
        """C, with those of the end."""
        return self.end_class + 2 * (self.end_id is not None)

    @property
    def end_class(self) -> int:
        """The class of the end token; that of what follows it is the next one."""
        return self.tokens.num_classes

    @cached_property
    def _edges(self) -> dict[int | bytes, Edges]:
        """By place, and by what decides them: those of many places are the same."""
        return {}

    def edges(self, place: int) -> Edges:
        """The transitions of a place."""
        if place not in self._edges:
            may_end = self.end_id is not None and place >= self.least
            before, after = self.alive[place], self.alive[place + 1]
            key = b"%d" % may_end + before.tobytes() + after.tobytes()
            if key not in self._edges:
                source, number, target = all_edges(self.tokens, self.end_id is not None, may_end)
                kept = before[source] & after[target]
                self._edges[key] = Edges(source[kept], number[kept], target[kept], self.alive.shape[1])
            self._edges[place] = self._edges[key]
        return self._edges[place]

    def walk(self, ids: Sequence[int], state: int = 0) -> int:
        """The state after these tokens, which the automaton accepts."""
        last = len(self.tokens.final)  # END if there is one
        for index in ids:
            if state == last or index == self.end_id:
                return last
            state = self.tokens.after(state, index)
        return state

    def allowed(self, place: int, state: int, num_symbols: int) -> Bools:
        """(V,), the symbols that may be at a place after a state; after the end, the end token alone."""
        edges, found = self.edges(place), np.zeros(self.num_classes + 1, dtype=bool)
        found[edges.number[edges.source == state]] = True
        if self.end_id is not None:
            found[self.end_class] |= found[self.end_class + 1]
        return found[self.classes(num_symbols)]  # -1 is the last one, which is never allowed

    @cached_property
    def columns(self) -> tuple[Tensor, Groups]:
        """The tokens, those of one class after those of another, and where classes begin."""
        tokens, class_of = self.tokens.tokens, self.tokens.class_of
        if self.end_id is not None:
            tokens, class_of = np.append(tokens, self.end_id), np.append(class_of, self.end_class)
        groups = Groups.of(class_of, self.num_classes)
        return torch.from_numpy(tokens[groups.order]), groups

    def classes(self, num_symbols: int) -> Ints:
        """(V,), the class of every symbol; -1 at those that it never accepts."""
        found = np.full(num_symbols, -1)
        found[self.tokens.tokens] = self.tokens.class_of
        if self.end_id is not None:
            found[self.end_id] = self.end_class
        return found


def all_edges(tokens: TokenAutomaton, has_end: bool, may_end: bool = True) -> tuple[Ints, Ints, Ints]:
    """Source, class and target of all transitions."""
    source, number, target = tokens.source, tokens.number, tokens.target
    if has_end:
        last, end_class = len(tokens.final), tokens.num_classes
        final = tokens.final.nonzero()[0] if may_end else np.zeros(0, dtype=np.int64)
        source = np.concatenate([source, final, [last]])
        number = np.concatenate([number, np.full(len(final), end_class), [end_class + 1]])
        target = np.concatenate([target, np.full(len(final) + 1, last)])
    return source, number, target


@dataclass(frozen=True)
class ConstrainedHole:
    """A hole of a canvas whose text is constrained: the positions of a row from `starts[0]` on, one for each place.

    Holes of one name have the same tokens, and begin at each of `starts`.
    """

    row: int
    starts: tuple[int, ...]
    automaton: HoleAutomaton
    name: str = ""

    def ids(self, row: Tensor, mask_id: int) -> Tensor:
        """(P,), the tokens of its places on a row (L,), masks where no hole of the name has one."""
        num_places = min(self.automaton.num_places, len(row) - max(self.starts))
        ids = row[torch.tensor(self.starts)[:, None] + torch.arange(num_places)]
        is_masked = (ids == mask_id).all(dim=0)
        return ids.masked_fill(ids == mask_id, -1).amax(dim=0).masked_fill(is_masked, mask_id)


@lru_cache(maxsize=256)
def fitted(tokens: TokenAutomaton, num_places: int, end_id: int | None = None, least: int = 0) -> HoleAutomaton | None:
    """The automaton of a hole with so many tokens or, with an `end_id`, at least `least` and at most so many.

    None if no accepted sequence fits.
    """
    has_end = end_id is not None
    source, number, target = all_edges(tokens, has_end)
    too_early = number == tokens.num_classes  # the end token
    final = np.append(tokens.final, True) if has_end else tokens.final
    reached, ends = [np.arange(len(final)) == 0], [final]

    def step(states: Bools, place: int, before: Ints, after: Ints) -> Bools:
        alive, found = states[before], np.zeros_like(states)
        if has_end and place < least:
            alive = alive & ~too_early
        found[after[alive]] = True
        return found

    for place in range(num_places):
        reached.append(step(reached[-1], place, source, target))
        ends.append(step(ends[-1], num_places - 1 - place, target, source))
    alive = np.stack(reached) & np.stack(ends[::-1])
    return HoleAutomaton(tokens, alive, end_id, least) if alive[0][0] else None
