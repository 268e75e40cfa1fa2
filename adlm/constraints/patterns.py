"""A constraint -> a deterministic automaton over bytes, within limits of memory and time.

Regular expressions are parsed by Python's own parser, so that they mean what they mean to `re.fullmatch`. Then they
become a nondeterministic automaton over the UTF-8 bytes of their characters, and that a deterministic one by the usual
subset construction. Libraries that do the same were no fit: the index of outlines-core 0.2.14 refuses "abab" for (ab)+
and "ab" for a|ab, and neither it nor interegular bounds the subset construction, which may double with every character.

"And", "not" and lists of texts are made of deterministic automata (`byte_automata.py`), which then are parts of the
nondeterministic automaton around them.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, assert_never

import numpy as np

from adlm.constraints.byte_automata import (
    DEAD,
    MAX_BYTE_STATES,
    Budget,
    ByteAutomaton,
    TooLargeError,
    after_text,
    difference,
    intersection,
    minimised,
    of_texts,
)
from adlm.constraints.expressions import (
    ANYTHING,
    OPTION,
    Alternatives,
    Concatenation,
    Expression,
    Intersection,
    OneOf,
    OptionalParts,
    Repetition,
    Search,
)
from adlm.constraints.kinds import Constraint
from adlm.errors import UserError

MAX_PATTERN = 20_000
"""Characters of a regular expression."""
MAX_POSITIONS = 20_000
"""States of the nondeterministic automaton: about the characters of the expression, with repetitions written out."""
LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no text has them, and UTF-8 cannot encode them
CATEGORIES = {
    sre.CATEGORY_DIGIT: [(48, 57)],
    sre.CATEGORY_SPACE: [(9, 13), (32, 32)],
    sre.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
}
COMPLEMENTS = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
}

Ranges = list[tuple[int, int]]
"""First and last of each range of characters or bytes."""


@lru_cache(maxsize=64)
def byte_automaton(constraint: Constraint | str, prefix: str = "") -> ByteAutomaton:
    """The automaton of a text and then a constraint or regular expression; a user error if it exceeds a limit."""
    expression = constraint if isinstance(constraint, str) else constraint.expression
    try:
        automaton = _Compiler().automaton(expression)
    except TooLargeError:
        what = "regular expression" if isinstance(constraint, str) else "constraint"
        raise UserError(
            f"the {what} {constraint!r:.60} needs too large an automaton; give it fewer repetitions, choices and parts",
            OPTION,
        ) from None
    return after_text(prefix, automaton)


def _parsed(pattern: str) -> list[Any]:
    """The items of a regular expression; a user error if it is not valid."""
    if len(pattern) > MAX_PATTERN:
        raise UserError(
            f"the regular expression has {len(pattern):,} characters, and at most {MAX_PATTERN:,} are allowed; "
            "simplify it",
            OPTION,
        )
    try:
        with warnings.catch_warnings():  # about sets inside sets, which mean what they say here
            warnings.simplefilter("ignore", FutureWarning)
            parsed = sre_parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError) as error:
        raise UserError(f"the regular expression {pattern!r:.60} is not valid: {error}", OPTION) from None
    except RecursionError:
        raise _too_deep(pattern) from None
    if parsed.state.flags != re.ASCII:
        raise _unsupported(pattern, "flags")
    return list(parsed)


def _too_deep(pattern: str) -> UserError:
    return UserError(
        f"the regular expression {pattern!r:.60} has too many groups inside each other; simplify it", OPTION
    )


def _unsupported(pattern: str, what: str) -> UserError:
    return UserError(f"the regular expression {pattern!r:.60} uses {what}, which no constraint may; rewrite it", OPTION)


class _Compiler:
    """Makes deterministic automata of expressions."""

    def __init__(self) -> None:
        self.budget = Budget()
        self.parts: dict[int, ByteAutomaton] = {}
        """Of parts of nondeterministic automata, by identity: a part may be in several places."""

    def part(self, expression: Expression) -> ByteAutomaton:
        if id(expression) not in self.parts:
            self.parts[id(expression)] = self.automaton(expression)
        return self.parts[id(expression)]

    def automaton(self, expression: Expression) -> ByteAutomaton:
        if isinstance(expression, OneOf):
            return of_texts(expression.texts, self.budget)
        if isinstance(expression, Intersection):
            parts = sorted(map(self.automaton, expression.parts), key=lambda automaton: len(automaton.final))
            found = parts[0]
            for part in parts[1:]:
                found = intersection(found, part, self.budget)
            for part in map(self.automaton, expression.excluded):
                found = difference(found, part, self.budget)
            return found
        nfa = _Nfa(self)
        nfa.final = nfa.add(expression, nfa.new_state())
        return nfa.determinized()


class _Nfa:
    """A nondeterministic automaton over bytes, with transitions that read nothing."""

    def __init__(self, compiler: _Compiler):
        self.compiler, self.final = compiler, 0
        self.edges: list[list[tuple[int, int, int]]] = []
        """Of each state: first byte, last byte, next state."""
        self.skips: list[list[int]] = []
        """Of each state: the next ones that need no byte."""

    def new_state(self) -> int:
        if len(self.edges) >= MAX_POSITIONS:
            raise TooLargeError
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def add(self, expression: Expression, state: int) -> int:
        """Append an expression after a state; returns the state after it. No edge leads back to the state itself."""
        if isinstance(expression, str | Search):
            return self._add_pattern(expression, state)
        if isinstance(expression, OneOf | Intersection):
            return self._add_automaton(self.compiler.part(expression), state)
        if isinstance(expression, Concatenation):
            for part in expression.parts:
                state = self.add(part, state)
            return state
        if isinstance(expression, Alternatives):
            end = self.new_state()
            for part in expression.parts:
                self.skips[self.add(part, state)].append(end)
            return end
        if isinstance(expression, Repetition):
            return self._add_repetition(expression, state)
        if isinstance(expression, OptionalParts):
            return self._add_optional_parts(expression, state)
        assert_never(expression)

    def _add_pattern(self, expression: str | Search, state: int) -> int:
        """Without ^ at the beginning and $ at the end, which mean nothing where the whole text must match."""
        pattern, is_search = (expression.pattern, True) if isinstance(expression, Search) else (expression, False)
        items = _parsed(pattern)
        starts = bool(items) and items[0] == (sre.AT, sre.AT_BEGINNING)
        ends = len(items) > starts and items[-1] == (sre.AT, sre.AT_END)
        try:
            if is_search and not starts:
                state = self.add(ANYTHING, state)
            state = self._add_items(pattern, items[starts : len(items) - ends], state)
        except RecursionError:
            raise _too_deep(pattern) from None
        return self.add(ANYTHING, state) if is_search and not ends else state

    def _add_repetition(self, repetition: Repetition, state: int) -> int:
        part, least, most, separator = repetition.part, repetition.least, repetition.most, repetition.separator
        if not separator:
            return self._add_repeat(least, most, lambda start: self.add(part, start), state)
        for _ in range(least - 1):
            state = self.add(separator, self.add(part, state))
        if most is None:  # the part once, and a way back to it: were it written twice, parts in parts would double
            before = self._after(state)
            after = self._after(self.add(part, before))
            self.skips[self.add(separator, after)].append(before)
            return self._after(after)
        more = Concatenation((separator, part))
        return self._add_repeat(0, most - least, lambda start: self.add(more, start), self.add(part, state))

    def _add_automaton(self, automaton: ByteAutomaton, state: int) -> int:
        states, end = [self.new_state() for _ in automaton.final], self.new_state()
        self.skips[state].append(states[0])
        for each, row, is_final in zip(states, automaton.next.tolist(), automaton.final.tolist(), strict=True):
            if is_final:
                self.skips[each].append(end)
            byte = 0
            for target, group in groupby(row):
                num = len(list(group))
                if target != DEAD:
                    self.edges[each].append((byte, byte + num - 1, states[target]))
                byte += num
        return end

    def _add_optional_parts(self, optional: OptionalParts, state: int) -> int:
        """`none` is the state in which no part was written yet, `some` that in which one was; None if impossible."""
        none: int | None = state
        some: int | None = None
        for part, is_required in zip(optional.parts, optional.required, strict=True):
            before, after = self.new_state(), self.new_state()
            if none is not None:
                self.skips[none].append(before)
            if some is not None:
                self.skips[self.add(optional.separator, some)].append(before)
            self.skips[self.add(part, before)].append(after)
            if is_required:
                none = None
            elif some is not None:
                self.skips[some].append(after)
            some = after
        end = self.new_state()
        for last in (none, some):
            if last is not None:
                self.skips[last].append(end)
        return end

    def _add_items(self, pattern: str, items: Any, state: int) -> int:
        """Append the items of a parsed regular expression."""
        for kind, value in items:
            state = self._add_item(pattern, kind, value, state)
        return state

    def _add_item(self, pattern: str, kind: Any, value: Any, state: int) -> int:
        if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._add_characters(_characters(kind, value), state)
        if kind is sre.SUBPATTERN:
            _, add_flags, del_flags, items = value
            if add_flags or del_flags:
                raise _unsupported(pattern, "flags")
            return self._add_items(pattern, items, state)
        if kind is sre.BRANCH:
            end = self.new_state()
            for items in value[1]:
                self.skips[self._add_items(pattern, items, state)].append(end)
            return end
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):  # greedy or not: the same texts match
            least, most, items = value
            most = None if most is sre.MAXREPEAT else most
            return self._add_repeat(least, most, lambda start: self._add_items(pattern, items, start), state)
        names = {sre.AT: "^, $ or \\b inside", sre.GROUPREF: "back-references"}
        names |= dict.fromkeys((sre.ASSERT, sre.ASSERT_NOT), "lookaround")
        raise _unsupported(pattern, names.get(kind, str(kind).lower()))

    def _add_repeat(self, least: int, most: int | None, add: Callable[[int], int], state: int) -> int:
        """`add` appends what is repeated after a state."""
        for _ in range(least):
            state = add(self._after(state))
        if most is None:
            state = self._after(state)
            self.skips[add(state)].append(state)
            return self._after(state)
        ends = [state]
        for _ in range(most - least):
            ends.append(add(self._after(ends[-1])))
        end = self.new_state()
        for each in ends:
            self.skips[each].append(end)
        return end

    def _after(self, state: int) -> int:
        """A new state that needs no byte; each repetition has one, so their number is bounded."""
        new = self.new_state()
        self.skips[state].append(new)
        return new

    def _add_characters(self, characters: Ranges, state: int) -> int:
        end = self.new_state()
        before_end: dict[tuple[tuple[int, int], ...], int] = {(): end}  # by the bytes that are left until the end
        for low, high in characters:
            for sequence in _utf8_sequences(low, high):
                for length in range(1, len(sequence)):
                    left = sequence[-length:]
                    if left not in before_end:
                        before_end[left] = self.new_state()
                        self.edges[before_end[left]].append((*left[0], before_end[left[1:]]))
                self.edges[state].append((*sequence[0], before_end[sequence[1:]]))
        return end

    def determinized(self) -> ByteAutomaton:
        """The subset construction, minimised. Bytes that no edge tells apart form a class."""
        cuts = {0} | {byte for edges in self.edges for low, high, _ in edges for byte in (low, high + 1)}
        starts = sorted(cuts - {256})
        class_of = np.searchsorted(starts, np.arange(256), side="right") - 1
        closures: dict[int, frozenset[int]] = {}
        start = self._closure({0}, closures)
        numbers, subsets, rows = {start: 0}, [start], list[list[int]]()
        known: dict[frozenset[int], int] = {}
        for subset in subsets:  # grows
            targets: list[set[int]] = [set() for _ in starts]
            for low, high, target in (edge for state in subset for edge in self.edges[state]):
                covered = range(class_of[low], class_of[high] + 1)
                self.compiler.budget.count(len(covered))
                for each in covered:
                    targets[each].add(target)
            row = []
            for states in targets:
                key = frozenset(states)
                if key and key not in known:
                    after = self._closure(states, closures)
                    if after not in numbers:
                        if len(subsets) == MAX_BYTE_STATES:
                            raise TooLargeError
                        numbers[after] = len(subsets)
                        subsets.append(after)
                    known[key] = numbers[after]
                row.append(known[key] if key else DEAD)
            self.compiler.budget.count(len(row))
            rows.append(row)
        final = np.array([self.final in subset for subset in subsets])
        return minimised(np.array(rows, dtype=np.int32), class_of, final, self.compiler.budget)

    def _closure(self, states: set[int], closures: dict[int, frozenset[int]]) -> frozenset[int]:
        """The states that are reached without a byte and matter: they read one or are final."""
        for state in [each for each in states if each not in closures]:
            found, waiting = {state}, [state]
            while waiting:
                new = [each for each in self.skips[waiting.pop()] if each not in found]
                found.update(new)
                waiting += new
                self.compiler.budget.count(1 + len(new))
            closures[state] = frozenset(each for each in found if self.edges[each] or each == self.final)
        self.compiler.budget.count(sum(len(closures[state]) for state in states))
        return frozenset().union(*(closures[state] for state in states))


def _characters(kind: Any, value: Any) -> Ranges:
    """The characters that one item of an expression matches."""
    if kind is sre.LITERAL:
        return _without_surrogates([(value, value)])
    if kind is sre.NOT_LITERAL:
        return _complement([(value, value)])
    if kind is sre.ANY:
        return _complement([(10, 10)])  # all but a line break
    found: Ranges = []
    for member, argument in value:
        if member is sre.LITERAL:
            found.append((argument, argument))
        elif member is sre.RANGE:
            found.append(argument)
        elif member is sre.CATEGORY:
            found += CATEGORIES[argument] if argument in CATEGORIES else _complement(CATEGORIES[COMPLEMENTS[argument]])
    return _complement(found) if value[0][0] is sre.NEGATE else _without_surrogates(found)


def _complement(ranges: Ranges) -> Ranges:
    """The characters outside the ranges."""
    found, start = [], 0
    for low, high in sorted([*ranges, SURROGATES]):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST_CHARACTER)] if start <= LAST_CHARACTER else found


def _without_surrogates(ranges: Ranges) -> Ranges:
    return _complement(_complement(ranges))


def _utf8_sequences(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The UTF-8 encodings of a range of characters, as sequences of ranges of bytes.

    A range is cut where the number of bytes changes, and where its last bytes do not run over all their values.
    """
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from _utf8_sequences(low, limit)
            yield from _utf8_sequences(limit + 1, high)
            return
    for num_last in (1, 2, 3) if high > 0x7F else ():
        ones = (1 << 6 * num_last) - 1
        if low & ~ones != high & ~ones:
            cut = low | ones if low & ones else (high & ~ones) - 1
            if low & ones or high & ones != ones:
                yield from _utf8_sequences(low, cut)
                yield from _utf8_sequences(cut + 1, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
