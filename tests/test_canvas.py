"""Canvases: text with masks."""

import re
import time

import pytest
import torch

from adlm.canvas import check_holes, encode_canvas, encode_holes, make_canvas, num_masks
from adlm.errors import UserError
from adlm.tokens import load_tokenizer, train_bpe

BYTES = load_tokenizer("bytes")
MASK = BYTES.vocabulary.mask_id


def test_holes_are_encoded_as_masks_and_the_rest_as_text():
    assert encode_canvas("ab[MASK]c[MASK*3]", BYTES) == [97, 98, MASK, 99, MASK, MASK, MASK]
    assert encode_canvas("[MASK*2]", BYTES) == [MASK, MASK]
    assert encode_canvas("no hole", BYTES) == BYTES.encode("no hole")


def test_a_space_before_a_hole_belongs_to_the_hole_if_tokens_include_their_leading_space():
    bpe = train_bpe(["the union of the states and the union of the people"] * 50, 320)
    ids = encode_canvas("the [MASK*2] of", bpe)
    assert ids == [*bpe.encode("the"), bpe.vocabulary.mask_id, bpe.vocabulary.mask_id, *bpe.encode(" of")]


def test_a_space_before_a_hole_stays_if_it_is_a_separate_symbol():
    assert encode_canvas("a [MASK]", BYTES) == [97, 32, MASK]
    text8 = load_tokenizer("text8")
    assert encode_canvas("a [MASK] b", text8) == [1, 0, text8.vocabulary.mask_id, 0, 2]


@pytest.mark.parametrize("text", ["[MASK*0]", "a [MASK*00] b"])
def test_a_hole_without_masks_is_a_user_error(text):
    with pytest.raises(UserError, match=r"has no masks; write \[MASK\*N\]"):
        encode_canvas(text, BYTES)


def test_holes_of_unknown_length_have_an_id_of_their_own_as_often_as_they_may_have_tokens():
    assert encode_canvas("a[MASK*..3]b[MASK*2]", BYTES, 300, 64) == [97, 300, 300, 300, 98, MASK, MASK]
    assert encode_canvas("a[MASK*]b", BYTES, 300, 64) == [97, *[300] * 16, 98], "a quarter of the length"
    two = encode_canvas("a[MASK*]b[MASK*]", BYTES, 300, 32)
    assert two == [97, *[300] * 8, 98, *[300] * 8]
    # bos, hole id and eos, 2 hole ids, eos, 42 letters, 8 tokens and eos, 2 tokens and eos, 2 hole ids: 62 of 64
    assert encode_canvas("a" * 42 + "[MASK*][MASK*2]", BYTES, 300, 64).count(300) == 8, "what is left"
    between = encode_canvas("a[MASK*]" + "b" * 24 + "[MASK*]c", BYTES, 300, 64)
    assert between.count(300) == 4, "twice 24 letters, c, a, 12 other ids"
    assert encode_canvas("a" * 64 + "[MASK*]", BYTES, 300, 64).count(300) == 1


def test_holes_of_unknown_length_are_a_user_error_for_models_that_cannot_fill_them():
    with pytest.raises(UserError, match=r"\[MASK\*..3\] is a hole of unknown length.*such as \[MASK\*12\]"):
        encode_canvas("a[MASK*..3]b", BYTES)
    with pytest.raises(UserError, match=r"\[MASK\*..0\] has no masks"):
        encode_canvas("a[MASK*..0]b", BYTES, 300, 64)


def test_masks_are_counted_without_encoding():
    assert num_masks("[MASK] [MASK*3] [MASK*..4] [MASK*]") == 9


def test_malformed_holes_are_text():
    assert MASK not in encode_canvas("[mask] [MASK*..] [MASK*-1] [MASK *2]", BYTES)


@pytest.mark.parametrize(
    "text",
    [
        *("[mask]", "[MASK * 2]", "[mask*]", "[ MASK ]", "[MASK*-1]", "[Mask*3]", "[MASK*4", "[mask*4", "[MASK"),
        *("[MASK 4", "[MASK*..]", "[MASK*..4", "[MASK*...4]", "[mask*..4]", "[MASK*.. 4]", "[MASK*.."),
    ],
)
def test_what_looks_like_a_hole_is_refused(text):
    with pytest.raises(UserError, match=rf"{re.escape(text)} is not a hole; write \[MASK\] for one token"):
        check_holes(f"a [MASK*2] and {text} was [MASK]")


def test_holes_and_other_brackets_are_not_refused():
    check_holes(
        "[MASK] [MASK*12] [MASK*..12] [MASK*] x[mask*.5] [masked] [MASKED] [unmask] [1] mask x[mask, 0] x[mask * y]"
    )


def test_a_hole_may_have_a_name():
    text = "[MASK*2:first]b [MASK*1:a_2][MASK*3]"
    check_holes(text)
    ids, holes = encode_holes(text, BYTES)
    assert ids == encode_canvas("[MASK*2]b [MASK][MASK*3]", BYTES)
    assert [(hole.name, hole.start, hole.num) for hole in holes] == [("first", 0, 2), ("a_2", 4, 1), ("", 5, 3)]
    for wrong in ("[MASK:]", "[MASK*4:2a]", "[MASK*4:a b]", "[MASK*x]", "[MASK**4]", f"[MASK:{'a' * 33}]"):
        with pytest.raises(UserError, match=rf"^{re.escape(wrong)} is not a hole.* with a name of letters, digits"):
            check_holes(f"{wrong}, a list] of [MASK]")
    for wrong in ("[MASK:name", "[MASK:name of [MASK*3]", f"[MASK:{'a' * 50}]"):
        with pytest.raises(UserError, match=r"^\[MASK is not a hole"):
            check_holes(wrong)


def test_holes_of_unknown_length_say_how_long_they_may_be():
    """Those without a number have a quarter of the length each."""
    ids, holes = encode_holes("a[MASK*2..5:x]b[MASK:y]c[MASK*..3]", BYTES, open_id=999, length=64)
    known = BYTES.encode("a")
    assert [(hole.name, hole.num, hole.least, hole.is_open) for hole in holes] == [
        ("x", 5, 2, True),
        ("y", 16, 0, True),
        ("", 3, 0, True),
    ]
    assert [hole.start for hole in holes] == [1, 7, 24]
    assert ids[:1] == known
    assert all(ids[hole.start : hole.start + hole.num] == [999] * hole.num for hole in holes)
    assert ids.count(999) == 24
    with pytest.raises(UserError, match=r"MASK:y\] .* constraint, --constrain 'y=...' .*\{'y': ...\}.*\[MASK\*12:y\]"):
        encode_holes("a[MASK:y]", BYTES)
    with pytest.raises(UserError, match=r"\[MASK\*\] is .* needs a name and a constraint, .* such as smollm2; or give"):
        encode_holes("a[MASK*]", BYTES)
    with pytest.raises(UserError, match=r"\[MASK\*5..3\] has at least 5 and at most 3 tokens; exchange them"):
        check_holes("a[MASK*5..3]")


def test_shorter_rows_are_padded_at_the_end():
    canvas = make_canvas([[1, 2, 3], [4]], filling=9)
    assert canvas.ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert canvas.pad.tolist() == [[False, False, False], [False, True, True]]
    assert canvas.texts(canvas.ids) == [[1, 2, 3], [4]]


def test_tokens_before_the_start_are_not_part_of_the_text():
    canvas = make_canvas([[0, 1, 2, 3], [4]], filling=9, starts=[1, 0])
    assert canvas.texts(canvas.ids) == [[1, 2, 3], [4]]


def test_rows_of_equal_length_have_no_padding():
    canvas = make_canvas([[1, 2], [3, 4]], filling=9)
    assert canvas.pad is None
    assert canvas.texts(canvas.ids) == [[1, 2], [3, 4]]
    assert canvas.ids.dtype == torch.int64


def test_a_long_text_is_checked_in_time_linear_in_its_length():
    started = time.monotonic()
    check_holes("[mask" + " " * 100_000 + "x")
    assert time.monotonic() - started < 5  # milliseconds; a pattern that backtracks takes days


def test_rows_of_a_canvas_are_taken_as_often_as_named_and_no_wider_than_the_longest_of_them():
    canvas = make_canvas([[1, 2, 3], [4], [5, 6]], filling=9, starts=[0, 0, 1])
    taken = canvas.take([2, 1, 2])
    assert taken.ids.tolist() == [[5, 6], [4, 9], [5, 6]]
    assert taken.pad.tolist() == [[False, False], [False, True], [False, False]]
    assert taken.texts(taken.ids) == [[6], [4], [6]]
    assert canvas.take([0, 0]).pad is None, "as a canvas made of these rows"
