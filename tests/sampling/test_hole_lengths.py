"""Lengths of constrained holes of whole rows: drawn in proportion to the mass of the constraint, by enumeration."""

import itertools
import math
import re
from collections import Counter

import pytest
import torch
from worlds import seeded

import adlm
from adlm.canvas import HOLE, Hole
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError
from adlm.sampling.hole_lengths import MAX_LENGTHS, open_holes, with_lengths

PIECES, MASK = {0: b"a", 1: b"b", 2: b"ab"}, 3


def automaton(pattern):
    return compile_tokens(byte_automaton(pattern), pieces_of(PIECES), pattern)


def encode(text):
    """Every letter outside holes is token 0."""
    ids, holes, end = [], [], 0
    for mark in HOLE.finditer(text):
        ids += [0] * (mark.start() - end)
        holes.append(Hole(mark[2], len(ids), int(mark[1]), False))
        ids += [MASK] * int(mark[1])
        end = mark.end()
    return ids + [0] * (len(text) - end), holes


def beliefs(ids):
    """They depend on the length of the row and on the place."""
    return torch.randn(len(ids), MASK, generator=seeded(len(ids)), dtype=torch.float64).log_softmax(dim=-1)


def test_a_length_has_the_share_of_the_texts_that_satisfy_the_constraint():
    pattern, text = "a*b|abab", "x[MASK*..4:hole]yy"
    holes = open_holes(text, {"hole": automaton(pattern)}, 16, MASK, encode, beliefs)
    assert holes.lengths == ((1, 2, 3, 4),)
    weights = []
    for num in (1, 2, 3, 4):
        row = beliefs([0] * (3 + num)).exp()[1 : 1 + num]
        texts = (x for x in itertools.product(PIECES, repeat=num))
        matching = (x for x in texts if re.fullmatch(pattern, b"".join(map(PIECES.get, x)).decode()))
        weights.append(sum(math.prod(float(row[i, token]) for i, token in enumerate(x)) for x in matching))
    assert holes.log_weights[0].exp().tolist() == pytest.approx(weights, rel=1e-12)
    drawn = Counter(holes.drawn([(number + 0.5) / 4000]) for number in range(4000))
    for num, weight in zip((1, 2, 3, 4), weights, strict=True):
        assert abs(drawn[f"x[MASK*{num}:hole]yy"] - 4000 * weight / sum(weights)) <= 1


def test_lengths_keep_to_the_range_of_the_mark_and_to_the_room_of_the_model():
    of = {"h": automaton("(ab)*b"), "one": automaton("a")}
    assert open_holes("[MASK*2..3:h]", of, 16, MASK, encode, beliefs).lengths == ((2, 3),)
    assert open_holes("xx[MASK:h]x[MASK:one]", of, 16, MASK, encode, beliefs).lengths == ((1, 2, 3, 4), (1,))
    assert open_holes("xx[MASK*..9:h]x", of, 6, MASK, encode, beliefs).lengths == ((1, 2, 3),), "six tokens are room"
    two = open_holes("[MASK*..9:h]x[MASK*..9:h]", of, 7, MASK, encode, beliefs)
    assert two.lengths == ((1, 2, 3),), "two holes of one name have the same length"
    assert two.drawn([0.99]).count("[MASK*3:h]") == 2
    many = open_holes("[MASK*..100:h]", of, 1000, MASK, encode, beliefs).lengths[0]
    assert (len(many), many[0], many[-1]) == (MAX_LENGTHS, 1, 100)


def test_a_hole_without_a_choice_of_lengths_needs_no_network_and_an_infeasible_one_is_refused():
    def never(ids):
        raise AssertionError

    fixed = open_holes("x[MASK:one]", {"one": automaton("abb")}, 64, MASK, encode, lambda ids: beliefs(ids))
    assert fixed.lengths == ((2, 3),)
    single = open_holes("x[MASK:one]", {"one": automaton("a")}, 64, MASK, encode, never)
    assert single.drawn([0.5]) == "x[MASK*1:one]"
    with pytest.raises(UserError, match="hole one cannot be satisfied with 4 to 5 tokens; it can have 2 to 3"):
        open_holes("[MASK*4..5:one]", {"one": automaton("abb")}, 64, MASK, encode, never)


def test_only_holes_of_unknown_length_are_changed():
    assert with_lengths("[MASK*2:a] [MASK:a] [MASK] [MASK*1..3:b]", {"a": 5, "b": 2}) == (
        "[MASK*2:a] [MASK*5:a] [MASK] [MASK*2:b]"
    )


def test_the_model_in_the_box_fills_holes_of_unknown_length():
    """The samples of one text have lengths of their own, and a sample does not depend on the others."""
    lm, words = adlm.load(), ["king", "man", "horse", "old man"]
    text, constraints = "The [MASK:who] was old, and the [MASK:who] went home.", {"who": adlm.Choices(words)}
    filled = lm.fill(text, num=12, steps=4, temperature=4.0, constraints=constraints)
    assert {*filled} <= {text.replace("[MASK:who]", word) for word in words}
    assert len({*filled}) > 1
    assert filled[0] == lm.fill(text, steps=4, temperature=4.0, constraints=constraints)
    with pytest.raises(
        UserError, match=r"\[MASK\*2:who\] and \[MASK\*3:who\] have one name, so they are filled with the same tokens"
    ):
        lm.fill("[MASK*2:who] and [MASK*3:who]")
    with pytest.raises(UserError, match="is a hole of unknown length, which needs a constraint, --constrain 'who="):
        lm.fill("a [MASK:who] b", steps=4)
