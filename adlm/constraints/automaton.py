"""A constraint -> an automaton over the tokens of a tokenizer, for holes of a given number of tokens.

Every sequence of tokens whose bytes match is accepted, not only the one that the tokenizer would encode the text as.
Special tokens are never accepted. Independent of networks.

Bytes that no state tells apart are one class, and tokens with the same classes of bytes are one spelling: spellings are
far fewer than tokens. A walk over the tree of spellings finds the transitions of many states at once and leaves out
what is not accepted, so a list of thousands of texts costs no more than its texts. Tokens that lead to the same next
state from every state form a class, and all work after compiling is in transitions between states by classes.

Shapes: K tokens that some accepted sequence has, C classes of tokens, S states, E transitions, N tokens of a tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from adlm.constraints.byte_automata import DEAD, ByteAutomaton, byte_classes, mixed
from adlm.constraints.expressions import OPTION
from adlm.constraints.kinds import Constraint
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError
from adlm.tokens import Tokenizer

MAX_SPELLED = 2**23
"""Transitions by spellings: about 50 bytes each while they are sorted."""
STATES_AT_ONCE = 32
MAX_CACHED = 64
"""Automata kept in memory."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Accepts the token sequences that satisfy a constraint. State 0 is the start."""

    tokens: Ints
    """(K,), the ids of tokens that some state allows, ascending."""
    class_of: Ints
    """(K,), the class of each."""
    source: Ints
    """(E,), the state before a token; ascending."""
    number: Ints
    """(E,), the class of the token; ascending for a source."""
    target: Ints
    """(E,), the state after it."""
    final: NDArray[np.bool_]
    """(S,), True where the tokens so far satisfy the constraint."""

    @cached_property
    def num_classes(self) -> int:
        return int(self.class_of.max(initial=-1)) + 1

    @cached_property
    def is_feasible(self) -> bool:
        """Whether any sequence is accepted."""
        return bool(self.final[self.target].any())

    @cached_property
    def _steps(self) -> Ints:
        """(2, n), the pairs of states of which a token leads from the first to the second."""
        pairs = np.unique(self.source * len(self.final) + self.target)
        return np.stack([pairs // len(self.final), pairs % len(self.final)])

    def lengths(self, most: int) -> list[int]:
        """The numbers of tokens, from 1 to `most`, with which the constraint can be satisfied."""
        (source, target), reached, found = self._steps, np.arange(len(self.final)) == 0, []
        for length in range(1, most + 1):
            before, reached = reached, np.zeros_like(reached)
            reached[target[before[source]]] = True
            if (reached & self.final).any():
                found.append(length)
        return found

    def class_of_symbol(self, index: int) -> int:
        """The class of a token that some state allows."""
        return int(self.class_of[np.searchsorted(self.tokens, index)])

    def after(self, state: int, index: int) -> int:
        """The state after a token that the state allows."""
        first, end = np.searchsorted(self.source, [state, state + 1])
        return int(self.target[first + np.searchsorted(self.number[first:end], self.class_of_symbol(index))])


@lru_cache(maxsize=MAX_CACHED)
def token_automaton(constraint: Constraint | str, tokenizer: Tokenizer, prefix: str = "") -> TokenAutomaton:
    """The automaton of a text and then a constraint, or regular expression, over the tokens of a tokenizer."""
    return compile_tokens(byte_automaton(constraint, prefix), _pieces(tokenizer), constraint)


@dataclass(frozen=True)
class Pieces:
    """The bytes of the tokens that may be in a text, the longest first."""

    ids: Ints
    """(N,)"""
    bytes: NDArray[np.uint8]
    """(N, longest), 0 after the end of a token."""
    num_longer: tuple[int, ...]
    """How many tokens have a first, second, ... byte."""


@lru_cache(maxsize=8)
def _pieces(tokenizer: Tokenizer) -> Pieces:
    """The bytes of all tokens but special and empty ones."""
    if not isinstance(tokenizer.engine.decoder, decoders.ByteLevel | decoders.Fuse):
        raise UserError(
            f"{OPTION} need a tokenizer whose tokens are bytes or characters, and the text of a token of "
            f"{tokenizer.name} depends on its neighbours; use a model with a byte-level tokenizer, such as box",
            OPTION,
        )
    added = tokenizer.engine.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    special |= {*tokenizer.special_ids, tokenizer.vocabulary.mask_id}
    pieces = {index: tokenizer.piece(index) for index in range(tokenizer.vocabulary.size) if index not in special}
    return pieces_of({index: piece for index, piece in pieces.items() if piece})


def pieces_of(pieces: dict[int, bytes]) -> Pieces:
    ids = sorted(pieces, key=lambda index: (-len(pieces[index]), index))
    lengths = np.array([len(pieces[index]) for index in ids])
    longest = int(lengths.max(initial=0))
    joined = b"".join(pieces[index].ljust(longest, b"\0") for index in ids)
    table = np.frombuffer(joined, dtype=np.uint8).reshape(len(ids), longest)
    return Pieces(np.array(ids), table, tuple(int((lengths > place).sum()) for place in range(longest)))


@dataclass(frozen=True)
class _Level:
    """The nodes of the tree of spellings at one depth, sorted by their parents in the level before."""

    byte_class: Ints
    """The last class of each."""
    children: Ints
    """Where those of each node of the level before begin in this one, and the end."""
    spelling: Ints
    """The number of the spelling that ends at each, or -1."""


def _tree(classes: NDArray[np.int64], num_longer: tuple[int, ...], num_classes: int) -> tuple[list[_Level], Ints]:
    """The tree of the spellings of tokens whose bytes have classes (N, longest), and (N,) the spelling of each."""
    levels, spelling_of, num_spellings = [], np.zeros(len(classes), dtype=np.int64), 0
    node, num_parents = np.zeros(len(classes), dtype=np.int64), 1
    for place, (num, num_longer_still) in enumerate(zip(num_longer, (*num_longer[1:], 0), strict=True)):
        codes, node = np.unique(node[:num] * num_classes + classes[:num, place], return_inverse=True)
        ends = node[num_longer_still:]
        here, index = np.unique(ends, return_inverse=True)
        spelling = np.full(len(codes), -1)
        spelling[here] = num_spellings + np.arange(len(here))
        spelling_of[num_longer_still:num] = num_spellings + index
        num_spellings += len(here)
        children = np.searchsorted(codes // num_classes, np.arange(num_parents + 1))
        levels.append(_Level(codes % num_classes, children, spelling))
        num_parents = len(codes)
    return levels, spelling_of


def _transitions(table: NDArray[np.int32], levels: list[_Level], states: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The transitions of some states by spellings: source, spelling and target, in parts."""
    source = state = states
    node = np.zeros(len(states), dtype=np.int64)
    for level in levels:
        num = level.children[node + 1] - level.children[node]
        first = level.children[node] - np.cumsum(num) + num
        node = np.repeat(first, num) + np.arange(num.sum())
        state = table[np.repeat(state, num), level.byte_class[node]].astype(np.int64)
        alive = (state != DEAD).nonzero()[0]
        source, node, state = np.repeat(source, num)[alive], node[alive], state[alive]
        if not len(alive):
            return
        ends = (level.spelling[node] >= 0).nonzero()[0]
        yield source[ends], level.spelling[node[ends]], state[ends]


def compile_tokens(automaton: ByteAutomaton, pieces: Pieces, constraint: object) -> TokenAutomaton:
    """The token automaton of a byte automaton: its states are those byte states that tokens lead to."""
    table, byte_class = byte_classes(automaton.next)
    levels, spelling_of = _tree(byte_class[pieces.bytes], pieces.num_longer, table.shape[1])
    states, is_known, num_done, num_found = [0], np.arange(len(table)) == 0, 0, 0
    parts: list[tuple[Ints, Ints, Ints]] = [(np.zeros(0, dtype=np.int64),) * 3]
    while num_done < len(states):
        some = np.array(states[num_done : num_done + STATES_AT_ONCE])
        num_done += len(some)
        is_reached = np.zeros(len(table), dtype=bool)
        for part in _transitions(table, levels, some):
            num_found += len(part[0])
            if num_found > MAX_SPELLED:
                raise UserError(
                    f"the constraint {constraint!r:.60} needs more than {MAX_SPELLED:,} transitions between its "
                    f"states with the {len(pieces.ids):,} tokens of this tokenizer; give it fewer repetitions and "
                    "choices",
                    OPTION,
                )
            parts.append(part)
            is_reached[part[2]] = True
        new = (is_reached & ~is_known).nonzero()[0]
        is_known[new] = True
        states += new.tolist()
    number_of = np.full(len(table), DEAD)
    number_of[states] = np.arange(len(states))
    source, spelling, target = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _with_classes(
        number_of[source], spelling, number_of[target], automaton.final[states], pieces.ids, spelling_of
    )


def _with_classes(
    source: Ints, spelling: Ints, target: Ints, final: NDArray[np.bool_], ids: Ints, spelling_of: Ints
) -> TokenAutomaton:
    """The automaton of transitions by spellings: spellings with the same transitions are one class.

    They are found by 64-bit hashes, and compared exactly.
    """
    order = np.lexsort((source, spelling))
    source, spelling, target = source[order], spelling[order], target[order]
    pairs = source * len(final) + target
    found, starts, counts = np.unique(spelling, return_index=True, return_counts=True)
    sums = np.add.reduceat(mixed(pairs), starts) if len(found) else np.zeros(0, dtype=np.uint64)
    _, first, class_of = np.unique(sums, return_index=True, return_inverse=True)
    like = first[class_of]
    assert (counts == counts[like]).all()
    assert (pairs == pairs[np.repeat(starts[like] - starts, counts) + np.arange(len(pairs))]).all()
    number_of = np.full(int(spelling_of.max(initial=-1)) + 1, DEAD)
    number_of[found] = class_of
    of_token = number_of[spelling_of]
    tokens = (of_token != DEAD).nonzero()[0]
    tokens = tokens[np.argsort(ids[tokens])]
    is_first = np.zeros(len(found), dtype=bool)
    is_first[first] = True
    kept = np.repeat(is_first, counts).nonzero()[0]
    number = number_of[spelling[kept]]
    kept, number = (each[np.lexsort((number, source[kept]))] for each in (kept, number))
    return TokenAutomaton(ids[tokens], of_token[tokens], source[kept], number, target[kept], final)
