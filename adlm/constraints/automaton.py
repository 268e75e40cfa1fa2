"""A constraint -> an automaton over the tokens of a tokenizer, for holes of a given number of tokens.

Every sequence of tokens whose bytes match is accepted, not only the one that the tokenizer would encode the text as.
Special tokens are never accepted. Independent of networks.

Bytes that no state tells apart are one class, and the classes of a token's bytes are its spelling: there are far fewer
spellings than tokens. A walk over the trie of spellings finds the transitions of many states at once and leaves out
what is not accepted, so a list of thousands of texts costs no more than its texts. Tokens that lead to the same next
state from every state form a class, and all work after compiling is in transitions between states by classes.

Shapes: K tokens that some accepted sequence has, C classes of tokens, S states, E transitions, N tokens of a tokenizer.
"""

from collections.abc import Iterator, Sequence
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

MAX_SPELLED = 2**24
"""Transitions by spellings, three or four seconds."""
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
    """The nodes of the trie of spellings at one depth, sorted by their parents in the level before."""

    byte_class: Ints
    """The last class of each."""
    children: Ints
    """Where those of each node of the level before begin in this one, and the end."""
    spelling: Ints
    """The number of the spelling that ends at each, or -1."""


def _trie(classes: Ints, num_longer: Sequence[int], num_classes: int) -> tuple[list[_Level], Ints]:
    """The trie of the spellings of tokens whose bytes have classes (N, longest), and (N,) the spelling of each."""
    levels, spelling_of, num_spellings = [], np.zeros(len(classes), dtype=np.int64), 0
    node, num_parents = np.zeros(len(classes), dtype=np.int64), 1
    for place, (num, num_longer_still) in enumerate(zip(num_longer, (*num_longer[1:], 0), strict=True)):
        codes, node = np.unique(node[:num] * num_classes + classes[:num, place], return_inverse=True)
        here, index = np.unique(node[num_longer_still:], return_inverse=True)
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
    """The token automaton of a byte automaton: its states are those byte states that tokens lead to.

    The first walk finds these, and two 64-bit hashes of the transitions of every spelling. The second one follows one
    spelling of each class.
    """
    table, byte_class = byte_classes(automaton.next)
    classes = byte_class[pieces.bytes]
    levels, spelling_of = _trie(classes, pieces.num_longer, table.shape[1])
    states, hashes = _states_and_hashes(table, levels, int(spelling_of.max(initial=-1)) + 1)
    if states is None:
        raise UserError(
            f"the constraint {constraint!r:.60} needs more than {MAX_SPELLED:,} transitions between its states with "
            f"the {len(pieces.ids):,} tokens of this tokenizer; give it fewer repetitions and choices",
            OPTION,
        )
    tokens = (hashes[0] | hashes[1])[spelling_of].nonzero()[0]
    _, first, class_of = np.unique(hashes[:, spelling_of[tokens]], axis=1, return_index=True, return_inverse=True)
    class_of, first = class_of.ravel(), np.sort(first)  # the longest first, as before

    num_longer = np.searchsorted(tokens[first], pieces.num_longer).tolist()
    levels, order = _trie(classes[tokens[first]], num_longer, table.shape[1])
    class_of_spelling = np.zeros_like(first)
    class_of_spelling[order] = class_of[first]
    parts = [np.stack(part) for some in _batches(states) for part in _transitions(table, levels, some)]
    source, spelling, target = np.concatenate([np.zeros((3, 0), dtype=np.int64), *parts], axis=1)
    number_of = np.full(len(table), DEAD)
    number_of[states] = np.arange(len(states))
    source, number, target = number_of[source], class_of_spelling[spelling], number_of[target]
    order, ascending = np.lexsort((number, source)), np.argsort(pieces.ids[tokens])
    return TokenAutomaton(
        pieces.ids[tokens[ascending]],
        class_of[ascending],
        source[order],
        number[order],
        target[order],
        automaton.final[states],
    )


def _states_and_hashes(
    table: NDArray[np.int32], levels: list[_Level], num_spellings: int
) -> tuple[list[int] | None, NDArray[np.uint64]]:
    """The states that tokens lead to, and (2, spellings) hashes of the transitions of each spelling, 0 without any; no
    states if there are too many transitions."""
    states, is_known, num_found = [0], np.arange(len(table)) == 0, 0
    hashes = np.zeros((2, num_spellings), dtype=np.uint64)
    for some in _batches(states):
        is_reached = np.zeros(len(table), dtype=bool)
        for source, spelling, target in _transitions(table, levels, some):
            num_found += len(source)
            if num_found > MAX_SPELLED:
                return None, hashes
            pairs = mixed(source * len(table) + target)
            np.add.at(hashes[0], spelling, pairs)
            np.add.at(hashes[1], spelling, pairs * pairs)
            is_reached[target] = True
        new = (is_reached & ~is_known).nonzero()[0]
        is_known[new] = True
        states += new.tolist()
    return states, hashes


def _batches(states: Sequence[int]) -> Iterator[Ints]:
    """The states, some at once; more may be added meanwhile."""
    done = 0
    while done < len(states):
        some = states[done : done + STATES_AT_ONCE]
        done += len(some)
        yield np.array(some)
