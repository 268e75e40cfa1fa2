"""Automata over bytes: minimal, and "and", "not" and lists of texts by listing all texts of a small alphabet."""

import itertools
import random
import re

import numpy as np
import pytest

from adlm.constraints import byte_automata
from adlm.constraints.byte_automata import DEAD, TooLargeError, difference, intersection, minimised, of_texts
from adlm.constraints.patterns import byte_automaton

TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("abé", repeat=length)]
PATTERNS = ["a*b*", "(?:ab|é)*", "[^a]*", ".{2,3}", "(?:a|b|é)*a.", "", "(?:..)*", "a[^\\s\\S]"]


def accepts(automaton, text):
    state = 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state == DEAD:
            return False
    return bool(automaton.final[state])


def accepted(automaton):
    return {text for text in TEXTS if accepts(automaton, text)}


def num_distinguishable(automaton):
    """How many states no text tells apart, dead ends left out: by the table of pairs that differ, as in textbooks."""
    table = np.append(automaton.next, np.full((1, 256), DEAD), axis=0)
    final = np.append(automaton.final, False)
    table[table == DEAD] = len(automaton.final)
    differ = final[:, None] != final[None, :]
    while True:
        more = differ | differ[table[:, None, :], table[None, :, :]].any(axis=2)
        if (more == differ).all():
            break
        differ = more
    representatives = {tuple(row) for row in differ.tolist()}
    return len(representatives) - 1  # all but those like the dead state


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(PATTERNS, 2)])
def test_intersection_and_difference_are_those_of_the_sets(one, other):
    first, second = byte_automaton(one), byte_automaton(other)
    assert accepted(intersection(first, second)) == accepted(first) & accepted(second)
    assert accepted(difference(first, second)) == accepted(first) - accepted(second)


def test_a_text_is_not_in_the_complement_of_the_complement_of_its_complement():
    everything = byte_automaton(r"[\s\S]*")
    for pattern in PATTERNS:
        automaton = byte_automaton(pattern)
        complement = difference(everything, automaton)
        assert accepted(complement) == {*TEXTS} - accepted(automaton)
        again = difference(everything, complement)
        assert (again.next == automaton.next).all()  # minimal automata of the same texts are equal
        assert difference(complement, complement).is_empty


def test_automata_have_as_few_states_as_texts_tell_apart():
    rng = random.Random(0)
    for _ in range(40):
        num = rng.randint(1, 12)
        table = np.array([[rng.randint(DEAD, num - 1) for _ in range(3)] for _ in range(num)], dtype=np.int32)
        reachable, waiting = {0}, [0]
        while waiting:
            new = {*table[waiting.pop()].tolist()} - reachable - {DEAD}
            reachable |= new
            waiting += new
        number = {state: place for place, state in enumerate(sorted(reachable))} | {DEAD: DEAD}
        table = np.array([[number[target] for target in table[state].tolist()] for state in sorted(reachable)])
        final = np.array([rng.random() < 0.4 for _ in reachable])
        classes = np.arange(256) % 3
        found = minimised(table.astype(np.int32), classes, final)
        whole = byte_automata.ByteAutomaton(table[:, classes], final)
        assert len(found.final) == max(1, num_distinguishable(whole))
        for text in TEXTS:
            assert accepts(found, text) == accepts(whole, text)


def test_a_minimisation_that_takes_too_long_keeps_its_states_and_its_texts(monkeypatch):
    expected = byte_automaton("(?:a|b|é)*a.")
    monkeypatch.setattr(byte_automata, "MAX_REFINEMENT", 1)
    states, classes = expected.next, np.arange(256)
    assert accepted(minimised(states, classes, expected.final)) == accepted(expected)


def test_a_list_of_texts_is_accepted_with_equal_ends_merged():
    rng = random.Random(0)
    for num in (1, 2, 7, 40):
        texts = rng.sample(TEXTS, num)
        automaton = of_texts(texts)
        assert accepted(automaton) == {*texts}
        assert len(automaton.final) == len(minimised(automaton.next, np.arange(256), automaton.final).final)
    assert len(of_texts([f"{number:05}" for number in range(100_000)]).final) == 6
    assert of_texts(["\ud800"]).is_empty  # UTF-8 has no such text


def test_automata_that_are_too_large_are_given_up(monkeypatch):
    monkeypatch.setattr(byte_automata, "MAX_BYTE_STATES", 20)
    with pytest.raises(TooLargeError):
        of_texts(["".join(letters) for letters in itertools.permutations("abcdef")])
    with pytest.raises(TooLargeError):
        intersection(byte_automaton("(?:.{5})*"), byte_automaton("(?:.{7})*"))
    monkeypatch.setattr(byte_automata, "MAX_PAIRS", 5)
    with pytest.raises(TooLargeError):
        difference(byte_automaton("a{9}"), byte_automaton("a{8}"))


def test_random_combinations_mean_what_they_mean_to_python():
    rng = random.Random(0)
    for _ in range(60):
        one, other = rng.sample(PATTERNS, 2)
        both, without = intersection(*map(byte_automaton, (one, other))), difference(*map(byte_automaton, (one, other)))
        for text in rng.sample(TEXTS, 20):
            matches = [re.fullmatch(pattern, text) is not None for pattern in (one, other)]
            assert accepts(both, text) == all(matches)
            assert accepts(without, text) == (matches[0] and not matches[1])
