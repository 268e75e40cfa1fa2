"""Laws of text with holes."""

import pytest
import torch

from adlm.canvas import encode_canvas, make_canvas
from adlm.errors import UserError
from adlm.tokens import load_tokenizer, train_bpe

BYTES = load_tokenizer("bytes")
MASK = BYTES.vocabulary.mask_id


def test_holes_become_masks_and_everything_else_stays():
    assert encode_canvas("ab[MASK]c[MASK*3]", BYTES) == [97, 98, MASK, 99, MASK, MASK, MASK]
    assert encode_canvas("[MASK*2]", BYTES) == [MASK, MASK]
    assert encode_canvas("no hole", BYTES) == BYTES.encode("no hole")


def test_a_space_before_a_hole_is_the_holes_own_where_words_begin_with_their_space():
    learnt = train_bpe(["the union of the states and the union of the people"] * 50, 320)
    ids = encode_canvas("the [MASK*2] of", learnt)
    assert ids == [*learnt.encode("the"), learnt.vocabulary.mask_id, learnt.vocabulary.mask_id, *learnt.encode(" of")]


def test_a_space_before_a_hole_is_kept_where_it_is_a_symbol_of_its_own():
    assert encode_canvas("a [MASK]", BYTES) == [97, 32, MASK]
    text8 = load_tokenizer("text8")
    assert encode_canvas("a [MASK] b", text8) == [1, 0, text8.vocabulary.mask_id, 0, 2]


@pytest.mark.parametrize("text", ["[MASK*0]", "a [MASK*00] b"])
def test_a_hole_of_nothing_is_refused(text):
    with pytest.raises(UserError, match=r"has no masks; write \[MASK\*N\]"):
        encode_canvas(text, BYTES)


def test_what_only_looks_like_a_hole_is_text():
    assert MASK not in encode_canvas("[mask] [MASK*] [MASK*-1] [MASK *2]", BYTES)


def test_shorter_rows_are_padded_at_the_end():
    canvas = make_canvas([[1, 2, 3], [4]], filling=9)
    assert canvas.ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert canvas.pad.tolist() == [[False, False, False], [False, True, True]]
    assert canvas.texts(canvas.ids) == [[1, 2, 3], [4]]


def test_what_stands_before_a_text_is_no_part_of_it():
    canvas = make_canvas([[0, 1, 2, 3], [4]], filling=9, starts=[1, 0])
    assert canvas.texts(canvas.ids) == [[1, 2, 3], [4]]


def test_rows_as_long_have_no_padding():
    canvas = make_canvas([[1, 2], [3, 4]], filling=9)
    assert canvas.pad is None
    assert canvas.texts(canvas.ids) == [[1, 2], [3, 4]]
    assert canvas.ids.dtype == torch.int64
