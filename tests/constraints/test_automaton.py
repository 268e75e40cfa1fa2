"""Token automata over the tokenizer of the box, and over that of smollm2 where its files are."""

import random
import re

import numpy as np
import pytest
from tokenizers import decoders

from adlm import Characters, Choices, JsonSchema, Regex, Words
from adlm.bases.named import find_named_base
from adlm.canvas import Hole, encode_holes
from adlm.constraints import automaton
from adlm.constraints.automaton import compile_tokens, pieces_of, token_automaton
from adlm.constraints.binding import hole_automaton
from adlm.constraints.byte_automata import DEAD
from adlm.constraints.holes import fitted
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError
from adlm.tokens import load_tokenizer

PATTERNS = [r"\d{4}-\d{2}", "[A-Z][a-z]+( [A-Z][a-z]+)?", "(?:yes|no|maybe so)", ".*", "é+|日本", '"[^"]{0,5}"']


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("box")


def random_ids(hole, rng):
    """A random accepted sequence; that every walk comes to its end is what pruning promises."""
    state, ids = 0, []
    for edges in map(hole.edges, range(hole.num_places)):
        choices = np.flatnonzero(edges.source == state)
        edge = rng.choice(choices.tolist())
        ids.append(int(rng.choice(hole.tokens.tokens[hole.tokens.class_of == edges.number[edge]].tolist())))
        state = edges.target[edge]
    return ids


def accepts(tokens, ids):
    state = 0
    for index in ids:
        numbers = tokens.class_of[tokens.tokens == index]
        found = tokens.target[(tokens.source == state) & np.isin(tokens.number, numbers)]
        if not len(found):
            return False
        (state,) = found
    return bool(tokens.final[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_are_accepted_if_their_text_matches(tokenizer, pattern):
    rng, tokens = random.Random(0), token_automaton(pattern, tokenizer)
    for num in tokens.lengths(8):
        for _ in range(10):
            ids = random_ids(fitted(tokens, num), rng)
            assert re.fullmatch(pattern, tokenizer.decode(ids), re.ASCII)
            assert accepts(tokens, ids)
            ids[rng.randrange(num)] = rng.randrange(1, tokenizer.vocabulary.mask_id)
            data = b"".join(map(tokenizer.piece, ids))
            is_text = data.decode(errors="replace").encode() == data
            assert accepts(tokens, ids) == (is_text and re.fullmatch(pattern, data.decode(), re.ASCII) is not None)


def test_special_tokens_are_never_accepted(tokenizer):
    tokens = token_automaton(r"[\s\S]*", tokenizer)
    assert not {*tokenizer.special_ids, tokenizer.vocabulary.mask_id} & {*tokens.tokens.tolist()}
    assert len(tokens.tokens) == tokenizer.vocabulary.size - 2 - 13  # 13 bytes are in no character of UTF-8


def test_a_choice_has_every_number_of_tokens_that_spell_it(tokenizer):
    """yes is y es, ye s, y e s; with the space before a hole, one more token can be spent on that."""
    assert tokenizer.encode("yes") != tokenizer.encode(" yes")
    assert token_automaton("yes", tokenizer).lengths(9) == [*range(len(tokenizer.encode("yes")), 4)]
    assert token_automaton("^yes$", tokenizer, " ").lengths(9) == [*range(len(tokenizer.encode(" yes")), 5)]


@pytest.mark.parametrize(("text", "after_space"), [("Say [MASK*2:x] now", True), ("Say:[MASK*2:x]", False)])
def test_the_space_before_a_hole_is_its_first_character(tokenizer, text, after_space):
    ids, [hole] = encode_holes(text, tokenizer)
    assert (hole.name, hole.num, hole.after_space) == ("x", 2, after_space)
    automaton = hole_automaton(Choices(["yes", "no"]), tokenizer, hole, None)
    for seed in range(10):
        ids[hole.start : hole.start + 2] = random_ids(automaton, random.Random(seed))
        assert tokenizer.decode(ids) in {text.replace("[MASK*2:x]", word) for word in ("yes", "no")}


@pytest.mark.parametrize(
    ("constraint", "num", "message"),
    [
        (Choices(["yes", "no"]), 9, "hole x cannot be satisfied with 9 tokens; it can have 1 to 3"),
        (Regex("(?:zq){4}|ab"), 5, "5 tokens; it can have 1 to 2 or 8"),
        (Regex(r"[^\x00-\U0010ffff]"), 1, "with 1 token; no text of this tokenizer satisfies it"),
        (Regex("(?:zq){150}"), 7, "with 7 tokens; it needs more than 256"),
    ],
)
def test_an_infeasible_hole_is_refused_with_the_lengths_that_are_feasible(tokenizer, constraint, num, message):
    with pytest.raises(UserError, match=message):
        hole_automaton(constraint, tokenizer, Hole("x", 0, num, False), None)


def test_a_token_automaton_is_bounded_and_cached(tokenizer, monkeypatch):
    assert token_automaton("abc", tokenizer) is token_automaton("abc", tokenizer)
    monkeypatch.setattr(automaton, "MAX_SPELLED", 40)
    with pytest.raises(UserError, match="needs more than 40 transitions between its states with the 4,094 tokens"):
        token_automaton("[a-c]{30}", tokenizer)


def plain_compile(automaton, pieces):
    """The transitions (state, token) -> state and the final states, by a loop over tokens and their bytes."""
    numbers, found, final = {0: 0}, {}, []
    for state in (todo := [0]):
        final.append(bool(automaton.final[state]))
        for index, piece in pieces.items():
            after = state
            for byte in piece:
                after = int(automaton.next[after, byte]) if after != DEAD else DEAD
            if after != DEAD:
                if after not in numbers:
                    numbers[after] = len(numbers)
                    todo.append(after)
                found[state, index] = after
    return found, {state for state, is_final in zip(todo, final, strict=True) if is_final}


@pytest.mark.parametrize("pattern", [*PATTERNS, "a", "(?:ab|ba|abab){1,3}", r"[\s\S]{1,2}", r"[^\x00-\U0010ffff]"])
def test_compiling_is_the_same_as_following_every_token_byte_by_byte(pattern):
    pieces = dict(enumerate([b"a", b"ab", b"b", b"\xc3", b"\xa9", b"ba", b"1", b"19", b"-", b'"a', b"yes", b" ", b"A"]))
    of_bytes = byte_automaton(Regex(pattern))
    tokens, (found, final) = compile_tokens(of_bytes, pieces_of(pieces), pattern), plain_compile(of_bytes, pieces)
    numbers = {0: 0}  # of a state of the plain automaton, the state here
    assert [*tokens.tokens] == sorted({index for _, index in found})
    for state, index in found:
        after = tokens.after(numbers[state], index)
        assert numbers.setdefault(found[state, index], after) == after
    assert len({*numbers.values()}) == len(numbers) == len(tokens.final)
    assert {numbers[state] for state in final} == {*np.flatnonzero(tokens.final)}
    in_class = np.bincount(tokens.class_of, minlength=tokens.num_classes)
    assert in_class[tokens.number].sum() == len(found)
    columns = {
        frozenset((state, found[state, index]) for state in numbers if (state, index) in found): index
        for index in tokens.tokens.tolist()
    }
    assert len(columns) == tokens.num_classes


def test_a_tokenizer_whose_tokens_depend_on_neighbours_is_refused():
    assert token_automaton("a+", load_tokenizer("text8")).lengths(3) == [1, 2, 3]
    words = load_tokenizer("text8")
    words.engine.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="constraints need a tokenizer whose tokens are bytes or characters"):
        hole_automaton(Regex("b"), words, Hole("x", 0, 1, False), None)


@pytest.mark.slow
def test_the_vocabulary_of_smollm2():
    if find_named_base("smollm2") is None:
        pytest.skip("the files of smollm2 are not on this machine")
    tokenizer, rng = load_tokenizer("base:smollm2"), random.Random(0)
    schema = JsonSchema({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}})
    checks = {
        Choices(["yes", "no"]): "yes|no",
        schema: r"\{.*\}",
        Words(["sea"]): r".*\bsea\b.*",
        Characters(3, 9): ".{3,9}",
    }
    for constraint, pattern in (checks | {Regex(pattern): pattern for pattern in PATTERNS}).items():
        tokens = token_automaton(constraint, tokenizer)
        for num in tokens.lengths(12):
            ids = random_ids(fitted(tokens, num), rng)
            assert re.fullmatch(pattern, tokenizer.decode(ids), re.ASCII | re.DOTALL)
