"""Constraints of the holes of texts: their automata, and what is refused before the first network call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adlm.canvas import Hole
from adlm.constraints.automaton import TokenAutomaton, token_automaton
from adlm.constraints.expressions import OPTION
from adlm.constraints.holes import ConstrainedHole, HoleAutomaton, fitted
from adlm.constraints.kinds import Constraint
from adlm.errors import UserError
from adlm.tokens import Tokenizer

MAX_LISTED = 256
"""Hole lengths that a message looks at."""


def bind_constraints(
    holes: Sequence[tuple[int, Hole]], constraints: Mapping[str, Constraint], tokenizer: Tokenizer, end_id: int | None
) -> tuple[ConstrainedHole, ...]:
    """The constrained ones of the holes of some rows; a user error for one that cannot be satisfied.

    Holes of one name in a row are one constrained hole. `end_id` ends those of unknown length that have no end token of
    their own.
    """
    groups: dict[tuple[int, str | int], list[Hole]] = {}
    for number, (row, hole) in enumerate(holes):
        if hole.name in constraints and (hole.name or hole.least):
            groups.setdefault((row, hole.name or number), []).append(hole)
    found = []
    for (row, _), same in groups.items():
        first = same[0]
        shapes = {(hole.num, hole.after_space, hole.is_open, hole.least) for hole in same}
        if len(shapes) > 1:
            raise UserError(
                f"holes of the name {first.name} are filled with the same tokens, so they must have the same length, "
                "and all or none of them a space before; change one, or give it another name",
                "texts",
            )
        end = end_id if first.end_id is None else first.end_id
        automaton = hole_automaton(constraints[first.name], tokenizer, first, end)
        found.append(ConstrainedHole(row, tuple(hole.start for hole in same), automaton, first.name))
    return tuple(found)


def hole_automaton(constraint: Constraint, tokenizer: Tokenizer, hole: Hole, end_id: int | None) -> HoleAutomaton:
    """The automaton of a hole; a user error if the constraint cannot be satisfied with so many tokens.

    Where a space before the hole belongs to its tokens (`Hole.after_space`), they begin with exactly that space, and
    the text after it satisfies the constraint. Otherwise they satisfy it as they are: in both cases the hole of the
    text, as it is written, is replaced by a text that satisfies the constraint.
    """
    tokens = token_automaton(constraint, tokenizer, " " if hole.after_space else "")
    found = fitted(tokens, hole.num, end_id if hole.is_open else None, hole.least)
    if found is None:
        raise infeasible(hole, tokens)
    return found


def check_between(
    holes: Sequence[tuple[int, Hole]], constraints: Mapping[str, Constraint], *, stop_at_eos: bool
) -> None:
    """A user error if holes of a row follow each other directly and cannot be told apart by a model that fills one run
    of masks after the other: where a constrained one has unknown length, a name that is constrained occurs twice, or
    the text may end before a constrained one."""
    runs: list[list[Hole]] = []
    last_row = -1
    for row, hole in sorted(holes, key=lambda each: (each[0], each[1].start)):
        if row == last_row and runs[-1][-1].start + runs[-1][-1].num == hole.start:
            runs[-1].append(hole)
        else:
            runs.append([hole])
        last_row = row
    for run in runs:
        named = [hole for hole in run if hole.name in constraints]
        names = [hole.name for hole in named if hole.name]
        may_end = stop_at_eos and any(hole.name not in constraints for hole in run)
        if len(run) > 1 and named and (any(hole.is_open for hole in run) or len(names) > len({*names}) or may_end):
            raise UserError(
                f"the constrained hole {named[0].name or '[MASK]'} and the hole beside it have no text between them "
                "but perhaps a space, which belongs to a hole; write some, or make them one hole",
                "texts",
            )


def infeasible(hole: Hole, tokens: TokenAutomaton) -> UserError:
    """Why no text of a hole satisfies its constraint, with the lengths that are possible."""
    if lengths := tokens.lengths(MAX_LISTED):
        remedy = f"it can have {_listed(lengths)}"
    elif tokens.is_feasible:
        remedy = f"it needs more than {MAX_LISTED}"
    else:
        remedy = "no text of this tokenizer satisfies it"
    number = f"{hole.num} token{'s' if hole.num > 1 else ''}"
    if hole.is_open:
        number = f"{hole.least} to {number}" if hole.least else f"at most {number}"
    return UserError(f"the constraint of hole {hole.name} cannot be satisfied with {number}; {remedy}", OPTION)


def _listed(lengths: list[int]) -> str:
    """Whole numbers as `1 to 4, 6 or 9`."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and parts[-1][-1] == length - 1:
            parts[-1].append(length)
        else:
            parts.append([length])
    words = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts[:8]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def prefix_allowed_tokens(
    constraint: Constraint, tokenizer: Tokenizer, num_given: int, num_new: int, after_space: bool = False
) -> Callable[[int, Any], list[int]]:
    """A `prefix_allowed_tokens_fn` for `generate` of transformers: of at most `num_new` tokens that satisfy a
    constraint and then eos, those that may follow the ids after a prompt of `num_given`."""
    eos_id = tokenizer.vocabulary.eos_id
    hole = Hole("generate", 0, num_new, after_space, eos_id is not None)
    automaton = hole_automaton(constraint, tokenizer, hole, eos_id)

    def allowed(row: int, ids: Any) -> list[int]:
        new = ids[num_given:].tolist()
        symbols = automaton.allowed(len(new), automaton.walk(new), tokenizer.vocabulary.size)
        return symbols.nonzero()[0].tolist()

    return allowed
