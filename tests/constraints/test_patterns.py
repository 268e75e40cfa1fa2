"""Byte automata of regular expressions, against Python's own matcher."""

import itertools
import random
import re
import time

import pytest

from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError

TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("abé\n", repeat=length)]


def accepts(pattern, text):
    automaton, state = byte_automaton(pattern), 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state < 0:
            return False
    return bool(automaton.final[state])


def random_pattern(rng, depth=3):
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(["a", "b", "é", ".", "[^a]", "[a-é]", r"\w", r"\W", r"\s", ""])
    inner = [random_pattern(rng, depth - 1) for _ in range(2)]
    whole = rng.choice(["".join(inner), "|".join(inner)])
    return f"(?:{whole}){rng.choice(['', '', '*', '+', '?', '{2}', '{0,2}', '{1,}', '*?'])}"


@pytest.mark.parametrize("pattern", ["", "a|ab", "(ab)+", "é+b?", "^a*$", "((a*)*)*", "(|a)b", "a{2,3}.", "[^b]{1,2}"])
def test_a_text_is_accepted_if_the_whole_of_it_matches(pattern):
    assert [t for t in TEXTS if accepts(pattern, t)] == [t for t in TEXTS if re.fullmatch(pattern, t, re.ASCII)]


def test_random_expressions_mean_what_they_mean_to_python():
    rng = random.Random(0)
    for _ in range(30):
        pattern = random_pattern(rng)
        for text in rng.sample(TEXTS, 60):
            assert accepts(pattern, text) == (re.fullmatch(pattern, text, re.ASCII) is not None), (pattern, text)


def test_a_set_has_exactly_its_characters_around_every_length_of_utf8():
    ends = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF]
    near = {c for end in ends for c in range(end - 2, end + 3) if 0 <= c <= 0x10FFFF and not 0xD800 <= c <= 0xDFFF}
    for low, high in ((0x7E, 0x801), (0x80, 0x10FFFF), (0xFFF, 0x40000), (0, 0xD7FF)):
        pattern = f"[{re.escape(chr(low))}-{re.escape(chr(high))}]"
        assert {c for c in near if accepts(pattern, chr(c))} == {c for c in near if low <= c <= high}


@pytest.mark.parametrize(
    "pattern",
    [
        "[ab]*a[ab]{20}",
        "a{1000000}",
        "((a{1000}){1000}){1000}",
        "(){1000000000}",
        "((a?){100}){100}",
        "a{4294967295}",
        "(" * 5000 + "a" + ")" * 5000,
        "a" * 30_000,
    ],
    ids=lambda pattern: pattern[:20],
)
def test_hostile_expressions_are_refused_in_bounded_time(pattern):
    start = time.process_time()
    with pytest.raises(UserError, match=r"the regular expression .*(too large|too many groups|at most)") as caught:
        byte_automaton(pattern)
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 250
    assert caught.value.option == "constraints"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "uses lookaround"),
        (r"(a)\1", "uses back-references"),
        ("(?i)a", "uses flags"),
        ("(?i:a)", "uses flags"),
        (r"\bfoo", r"uses \^, \$ or \\b inside"),
        ("a++", "uses possessive_repeat"),
        ("(a", r"is not valid: missing \)"),
    ],
)
def test_what_an_automaton_cannot_express_is_refused(pattern, reason):
    with pytest.raises(UserError, match=f"the regular expression .* {reason}"):
        byte_automaton(pattern)
