"""A constraint -> an automaton over the tokens of a tokenizer, for holes of a given number of tokens.

Every sequence of tokens whose bytes match is accepted, not only the one that the tokenizer would encode the text as.
Special tokens are never accepted. Independent of networks.

Tokens that lead to the same next state from every state form a class: a vocabulary of 49,152 tokens has few of them,
and all work after compiling is in states and classes.

Shapes: V tokens of the vocabulary, K of them that some accepted sequence has, C classes, S states, P places of a hole.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from adlm.constraints.byte_automata import DEAD, ByteAutomaton, byte_classes
from adlm.constraints.expressions import OPTION
from adlm.constraints.kinds import Constraint
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError
from adlm.tokens import Tokenizer

MAX_CELLS = 2**25
"""States x tokens of a token automaton, 4 bytes each while it is compiled: 682 states with 49,152 tokens."""
CELLS_AT_ONCE = 2**21
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
    next: Ints
    """(S, C), the next state, or DEAD."""
    final: NDArray[np.bool_]
    """(S,), True where the tokens so far satisfy the constraint."""

    @cached_property
    def is_feasible(self) -> bool:
        """Whether any sequence is accepted."""
        return bool(self.final[self.next[self.next != DEAD]].any())

    @cached_property
    def _steps(self) -> Ints:
        """(2, N), the pairs of states of which a token leads from the first to the second."""
        source, number = (self.next != DEAD).nonzero()
        return np.unique(np.stack([source, self.next[source, number]]), axis=1)

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


def compile_tokens(automaton: ByteAutomaton, pieces: Pieces, constraint: object) -> TokenAutomaton:
    """The token automaton of a byte automaton: its states are those byte states that tokens lead to."""
    num_tokens = len(pieces.ids)
    table, byte_class = byte_classes(automaton.next)
    num_classes, dead = table.shape[1], len(table)  # dead is a state of its own here, from which all bytes lead to it
    step = np.append(np.where(table == DEAD, dead, table), np.full((1, num_classes), dead), axis=0)
    step = (step * num_classes).astype(np.int32).ravel()  # of state s and class c at s * C + c: the state times C
    classes = byte_class.astype(np.int32)[pieces.bytes]
    is_byte_token = np.isin(np.arange(256), pieces.bytes[sum(pieces.num_longer[1:2]) :, 0])
    if is_byte_token[(automaton.next != DEAD).any(axis=0)].all() and dead * num_tokens > MAX_CELLS:
        raise _too_large(constraint, dead, num_tokens)  # at once: tokens of one byte lead to all states
    states, num_done, number_of = [0], 0, np.full(dead + 1, DEAD, dtype=np.int32)
    number_of[0] = 0
    parts: list[NDArray[np.int32]] = []
    while num_done < len(states):
        if len(states) * num_tokens > MAX_CELLS:
            raise _too_large(constraint, len(states), num_tokens)
        some = np.array(states[num_done : num_done + max(1, CELLS_AT_ONCE // num_tokens)], dtype=np.int32)
        reached = np.repeat(some[:, None] * num_classes, num_tokens, axis=1)
        for place, num in enumerate(pieces.num_longer):
            reached[:, :num] = step[reached[:, :num] + classes[:num, place]]
        reached //= num_classes
        is_reached = np.zeros(dead + 1, dtype=bool)
        is_reached[reached] = True
        for state in np.flatnonzero(is_reached[:dead]).tolist():
            if number_of[state] == DEAD:
                number_of[state] = len(states)
                states.append(state)
        parts.append(number_of[reached].T)
        num_done += len(some)
    columns = np.concatenate(parts, axis=1)  # (tokens, S)
    allowed = (columns != DEAD).any(axis=1).nonzero()[0]
    allowed = allowed[np.argsort(pieces.ids[allowed])]
    columns = np.ascontiguousarray(columns[allowed])
    whole = columns.view(np.dtype((np.void, columns.itemsize * len(states))))[:, 0]  # compared byte by byte
    _, first, class_of = np.unique(whole, return_index=True, return_inverse=True)
    return TokenAutomaton(pieces.ids[allowed], class_of, columns[first].T.astype(np.int64), automaton.final[states])


def _too_large(constraint: object, num_states: int, num_tokens: int) -> UserError:
    return UserError(
        f"the constraint {constraint!r:.60} needs {num_states:,} states or more, and at most "
        f"{MAX_CELLS // num_tokens:,} are allowed with {num_tokens:,} tokens; give it fewer repetitions and choices",
        OPTION,
    )
