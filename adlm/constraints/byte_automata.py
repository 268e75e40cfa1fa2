"""Deterministic automata over bytes: minimisation, intersection, difference, lists of texts, all within limits.

Independent of how constraints are written.

Shapes: D states, C classes of bytes that no state tells apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTE_STATES = 10_000
"""States of an automaton."""
MAX_PAIRS = 100_000
"""Pairs of states of a product before it is minimised."""
MAX_PRODUCT_CELLS = 2**23
"""Pairs x classes of a product."""
MAX_REFINEMENT = 2**27
"""States x (classes + 16) x rounds of a minimisation, about a second."""
MAX_WORK = 4_000_000
"""Elementary steps of all that is done for a constraint, two or three seconds."""
CELLS_A_STEP, REFINED_A_STEP = 8, 32
"""Cells of a product, and of a round of minimisation, that take about as long as a step of the subset construction."""
STEPS_A_ROUND = 60
"""What a round of whole-array operations takes, if the arrays are small."""

DEAD = -1
"""The next state where no match is possible any more."""


class TooLargeError(Exception):
    """An automaton or the work of making it exceeds a limit; `patterns.byte_automaton` makes it a user error."""


class Budget:
    """Counts the elementary steps for a constraint, all its parts together."""

    def __init__(self, most: int = MAX_WORK):
        self.left = most

    def count(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooLargeError


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Accepts the UTF-8 bytes of the texts that match as a whole. State 0 is the start."""

    next: NDArray[np.int32]
    """(D, 256), the state after each byte, or DEAD."""
    final: NDArray[np.bool_]
    """(D,), True where the bytes so far are a match."""

    @property
    def is_empty(self) -> bool:
        """Whether it accepts no text at all; of a minimised automaton."""
        return not self.final.any()


def minimised(
    table: NDArray[np.int32], class_of: NDArray[np.int64], final: NDArray[np.bool_], budget: Budget | None = None
) -> ByteAutomaton:
    """The automaton with the fewest states for the same texts, of next states (D, C), all of them reachable.

    Moore's algorithm: states are one class until a byte tells them apart. It begins with the length of the shortest and
    longest texts from a state on, which settles most automata in a few rounds; one that takes too many keeps its
    states. New classes are found by 64-bit hashes, and checked exactly at the end.
    """
    budget = budget or Budget()
    shortest = _shortest(table, final, budget)
    alive = shortest >= 0
    if not alive[0]:
        return ByteAutomaton(np.full((1, 256), DEAD, dtype=np.int32), np.zeros(1, dtype=bool))
    table = np.where(alive[table] & (table != DEAD), table, DEAD)  # without dead ends
    first_label = (shortest + 1) * (len(table) + 1) + _longest(table, budget) + 1
    table = np.where(table == DEAD, len(alive), table)  # one more state, of label 0
    label, num_labels = np.append(np.where(alive, first_label, 0), 0), 0
    factors = mixed(np.arange(table.shape[1])) | np.uint64(1)
    size = len(table) * (table.shape[1] + 16)
    for _ in range(max(1, min(MAX_REFINEMENT, budget.left * REFINED_A_STEP) // size)):
        budget.left -= size // REFINED_A_STEP
        hashes = mixed(label)
        signature = hashes[:-1].copy()
        for number, factor in enumerate(factors):
            signature += hashes[table[:, number]] * factor
        found, first, new = np.unique(signature[alive], return_index=True, return_inverse=True)
        label[:-1][alive] = new + 1
        if len(found) == num_labels:
            break
        num_labels = len(found)
    else:
        first, label[:-1][alive] = np.arange(alive.sum()), np.arange(1, alive.sum() + 1)
    first = alive.nonzero()[0][np.sort(first)]  # one state of each class, that of state 0 first
    number_of = np.full(len(first) + 1, DEAD, dtype=np.int32)
    number_of[label[first]] = np.arange(len(first))
    numbers = number_of[label]
    representative = first[numbers[:-1][alive]]
    assert (label[table[alive]] == label[table[representative]]).all()
    assert (final[alive] == final[representative]).all()
    return ByteAutomaton(numbers[table[first]][:, class_of], final[first])


def mixed(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random-looking bits of each number (splitmix64)."""
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def byte_classes(table: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The different columns (D, C) of a table (D, 256), and the class (256,) of each byte."""
    rows = np.ascontiguousarray(table.T)
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, class_of = np.unique(whole, return_index=True, return_inverse=True)
    return rows[first].T, class_of


@dataclass(frozen=True)
class _Predecessors:
    """The pairs of states of which a byte leads from the first to the second, by the second."""

    sources: NDArray[np.int64]
    ends: NDArray[np.int64]
    """(D + 1,), where the sources of each state begin, and end."""

    @staticmethod
    def of(table: NDArray[np.int32]) -> "_Predecessors":
        num = len(table)
        source, column = (table != DEAD).nonzero()
        pairs = np.unique(table[source, column].astype(np.int64) * num + source)
        return _Predecessors(pairs % num, np.searchsorted(pairs // num, np.arange(num + 1)))

    def before(self, states: NDArray[np.int64]) -> Any:
        """The sources of all pairs that lead to these states."""
        nums = self.ends[states + 1] - self.ends[states]
        return self.sources[np.repeat(self.ends[states] - np.cumsum(nums) + nums, nums) + np.arange(nums.sum())]


def _shortest(table: NDArray[np.int32], final: NDArray[np.bool_], budget: Budget) -> NDArray[np.int64]:
    """(D,), the fewest bytes after which a state is final; -1 if it never is."""
    predecessors, distance = _Predecessors.of(table), np.where(final, 0, -1)
    reached, length = final.nonzero()[0], 0
    while len(reached):
        budget.count(STEPS_A_ROUND)
        length += 1
        before = predecessors.before(reached)
        reached = np.unique(before[distance[before] < 0])
        distance[reached] = length
    return distance


def _longest(table: NDArray[np.int32], budget: Budget) -> NDArray[np.int64]:
    """(D,), the most bytes after which a state is not DEAD; -1 if there is no most."""
    predecessors = _Predecessors.of(table)
    longest, length = np.full(len(table), -1), 0
    num_left = np.bincount(predecessors.sources, minlength=len(table))  # of its next states, those without a most yet
    done = (num_left == 0).nonzero()[0]
    while len(done):
        budget.count(STEPS_A_ROUND)
        longest[done] = length
        length += 1
        before, times = np.unique(predecessors.before(done), return_counts=True)
        num_left[before] -= times
        done = before[num_left[before] == 0]
    return longest


def intersection(first: ByteAutomaton, second: ByteAutomaton, budget: Budget | None = None) -> ByteAutomaton:
    """Accepts what both accept; minimised."""
    return _product(first, second, False, budget or Budget())


def difference(first: ByteAutomaton, second: ByteAutomaton, budget: Budget | None = None) -> ByteAutomaton:
    """Accepts what the first accepts and the second does not; minimised."""
    return _product(first, second, True, budget or Budget())


def _product(first: ByteAutomaton, second: ByteAutomaton, negated: bool, budget: Budget) -> ByteAutomaton:
    """The reachable pairs of states. A difference goes on where the second automaton is dead, which accepts all."""
    dead, num = len(first.final), len(second.final) + 1
    columns, class_of = byte_classes(np.concatenate([first.next, second.next]))
    ends = np.repeat([dead, num - 1], [dead, num - 1])[:, None]  # instead of DEAD, a state of its own
    columns = np.where(columns == DEAD, ends, columns)
    first_next = columns[:dead]
    second_next = np.append(columns[dead:], np.full((1, columns.shape[1]), num - 1), axis=0)
    codes, parts, seen = np.zeros(1, dtype=np.int64), [], {0}  # a pair is first * num + second
    found = [codes]
    while len(codes):
        budget.count(codes.size * columns.shape[1] // CELLS_A_STEP + STEPS_A_ROUND)
        one, other = first_next[codes // num], second_next[codes % num]
        targets = np.where((one == dead) | ((other == num - 1) & (not negated)), -1, one * num + other)
        parts.append(targets)
        new = [code for code in np.unique(targets).tolist() if code >= 0 and code not in seen]
        seen.update(new)
        if len(seen) > MAX_PAIRS or len(seen) * columns.shape[1] > MAX_PRODUCT_CELLS:
            raise TooLargeError
        codes = np.array(new, dtype=np.int64)
        found.append(codes)
    pairs, table = np.concatenate(found), np.concatenate(parts)
    order = np.argsort(pairs)
    place = np.minimum(np.searchsorted(pairs, table, sorter=order), len(pairs) - 1)
    numbers = np.where(table < 0, DEAD, order[place]).astype(np.int32)
    final = first.final[pairs // num] & (np.append(second.final, False)[pairs % num] != negated)
    automaton = minimised(numbers, class_of, final, budget)
    if len(automaton.final) > MAX_BYTE_STATES:
        raise TooLargeError
    return automaton


def of_texts(texts: Iterable[str], budget: Budget | None = None) -> ByteAutomaton:
    """Accepts these texts: their trie with equal ends merged, made in one pass over the sorted texts; minimal."""
    registered: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
    path: list[tuple[int, bool, list[tuple[int, int]]]] = []  # the last text: a byte, and the state after it
    start: list[tuple[int, int]] = []
    is_start_final, last, budget = False, b"", budget or Budget()

    def close(depth: int) -> None:
        """Number the states of the last text below a depth: nothing will be added to them."""
        while len(path) > depth:
            byte, is_final, edges = path.pop()
            number = registered.setdefault((is_final, tuple(edges)), len(registered))
            if number >= MAX_BYTE_STATES - 1:
                raise TooLargeError
            (path[-1][2] if path else start).append((byte, number))

    for data in sorted({text.encode() for text in texts if not _has_surrogate(text)}):
        budget.count(len(data))
        shared = 0
        while shared < len(last) and last[shared] == data[shared]:  # sorted, so `data` is not a prefix of `last`
            shared += 1
        close(shared)
        path += [(byte, False, []) for byte in data[shared:]]
        if data:
            path[-1] = (data[-1], True, path[-1][2])
        is_start_final, last = is_start_final or not data, data
    close(0)
    table = np.full((len(registered) + 1, 256), DEAD, dtype=np.int32)
    final = np.array([is_start_final, *(is_final for is_final, _ in registered)])
    for state, edges in enumerate([start, *(edges for _, edges in registered)]):
        for byte, number in edges:
            table[state, byte] = number + 1
    return ByteAutomaton(table, final)


def _has_surrogate(text: str) -> bool:
    """Whether UTF-8 cannot encode the text: then no text of a hole is equal to it."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def after_text(text: str, automaton: ByteAutomaton) -> ByteAutomaton:
    """Accepts a text and then what the automaton accepts."""
    data = text.encode()
    moved = np.where(automaton.next == DEAD, DEAD, automaton.next + len(data)).astype(np.int32)
    chain = np.full((len(data), 256), DEAD, dtype=np.int32)
    chain[range(len(data)), list(data)] = range(1, len(data) + 1)
    return ByteAutomaton(np.append(chain, moved, axis=0), np.append(np.zeros(len(data), dtype=bool), automaton.final))
