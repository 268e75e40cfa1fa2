"""How many tokens a constrained hole of a whole row has, where the text leaves it open.

A model of whole rows has beliefs about a given number of masks. Of a hole that may have n tokens, for several n, one
number is drawn before sampling begins, in proportion to Z_n: the probability that independent draws from the beliefs at
n masks, all other holes as short as they can be, satisfy the constraint. So with several choices, each has its share by
the product of the beliefs in its tokens, as it has at the first step of a hole of given length. Nothing is divided by
the number of tokens: a longer choice is less likely, as longer texts are. The text after the hole is read, but not
scored; `LanguageModel.choose` does that.

Shapes: L tokens of a row, V symbols.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.canvas import HOLE, Hole, encode_holes, has_unknown_length, hole_name, least_tokens, most_tokens
from adlm.constraints.automaton import TokenAutomaton, token_automaton
from adlm.constraints.binding import infeasible
from adlm.constraints.conditioning import condition
from adlm.constraints.holes import fitted
from adlm.constraints.kinds import Constraint
from adlm.sampling.rng import RowRng
from adlm.tokens import Tokenizer

MAX_LENGTHS = 16
"""Lengths of a hole that are compared: of more, so many spread evenly over them."""

EncodeRow = Callable[[str], tuple[list[int], list[Hole]]]
"""A text with holes -> the ids that the model reads, and the holes in them."""
RowBeliefs = Callable[[list[int]], Tensor]
"""ids of a row (L,) -> log beliefs (L, V)."""


@dataclass(frozen=True)
class OpenHoles:
    """A text whose holes of unknown length have names, and what is known of their lengths."""

    text: str
    names: tuple[str, ...]
    """Of the holes of unknown length, each once."""
    lengths: tuple[tuple[int, ...], ...]
    """Of each, the numbers of tokens to choose from."""
    log_weights: tuple[Tensor, ...]
    """Of each, log Z of these numbers."""

    def drawn(self, uniforms: Sequence[float]) -> str:
        """The text with holes of given length, one uniform number for each name."""
        chosen = {}
        for name, lengths, log_weights, uniform in zip(
            self.names, self.lengths, self.log_weights, uniforms, strict=True
        ):
            ends = log_weights.softmax(dim=0).cumsum(dim=0)
            chosen[name] = lengths[min(int((ends <= uniform).sum()), len(lengths) - 1)]
        return with_lengths(self.text, chosen)


def texts_of_known_length(
    texts: Sequence[str],
    constraints: Mapping[str, Constraint],
    tokenizer: Tokenizer,
    length: int,
    encode: EncodeRow,
    beliefs: RowBeliefs,
    rng: RowRng,
) -> list[str]:
    """The texts of all rows of `rng`, equally many of each text, for a model of rows of `length`.

    The lengths of holes with constraints are drawn where the text leaves them open.
    """
    num, mask_id = len(rng) // len(texts), tokenizer.vocabulary.mask_id
    found: list[str] = []
    for number, text in enumerate(texts):
        automata = {
            hole.name: token_automaton(constraints[hole.name], tokenizer, " " if hole.after_space else "")
            for hole in encode_holes(text, tokenizer, -1, length)[1]
            if hole.is_open and hole.name in constraints
        }
        holes = open_holes(text, automata, length, mask_id, encode, beliefs)
        rows = range(number * num, (number + 1) * num)
        found += [holes.drawn(rng.for_lengths(row, len(holes.names))) for row in rows]
    return found


def with_lengths(text: str, lengths: Mapping[str, int]) -> str:
    """The text with holes of these names as holes of given length."""

    def mark(hole: re.Match[str]) -> str:
        name = hole_name(hole)
        return f"[MASK*{lengths[name]}:{name}]" if has_unknown_length(hole) and name in lengths else hole[0]

    return HOLE.sub(mark, text)


def open_holes(
    text: str, automata: Mapping[str, TokenAutomaton], length: int, mask_id: int, encode: EncodeRow, beliefs: RowBeliefs
) -> OpenHoles:
    """The lengths of the holes of unknown length that are named in `automata`, for a model of rows of `length`.

    A user error if a hole cannot satisfy its constraint. Beliefs are asked for only if all can.
    """
    marks = [mark for mark in HOLE.finditer(text) if has_unknown_length(mark) and hole_name(mark) in automata]
    holes = {
        hole_name(mark): Hole(hole_name(mark), 0, most_tokens(mark, length), False, True, least_tokens(mark))
        for mark in marks
    }
    feasible = {}
    for name, hole in holes.items():
        feasible[name] = [num for num in automata[name].lengths(min(hole.num, length)) if num >= hole.least]
        if not feasible[name]:
            raise infeasible(hole, automata[name])
    shortest = {name: lengths[0] for name, lengths in feasible.items()}
    room = max(0, length - len(encode(with_lengths(text, shortest))[0])) // len(marks)
    chosen, log_weights = [], []
    for name, lengths in feasible.items():
        chosen.append(_spread([num for num in lengths if num <= shortest[name] + room], MAX_LENGTHS))
        masses = [0.0]
        if len(chosen[-1]) > 1:
            masses = []
            for num in chosen[-1]:
                ids, found = encode(with_lengths(text, shortest | {name: num}))
                starts = [hole.start for hole in found if hole.name == name]
                automaton = fitted(automata[name], num)
                assert automaton is not None
                masked = torch.full((num,), mask_id)
                row = beliefs(ids)
                of_places = torch.stack([row[start : start + num] for start in starts]).sum(dim=0)
                masses.append(condition(of_places, automaton, masked, mask_id).log_mass)
        log_weights.append(torch.tensor(masses, dtype=torch.float64))
    return OpenHoles(text, tuple(holes), tuple(map(tuple, chosen)), tuple(log_weights))


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]
