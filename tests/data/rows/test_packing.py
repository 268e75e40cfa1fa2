"""Packing: what each protocol keeps, drops and pads, against plain reference implementations."""

import random

import numpy as np
import pytest

from adlm.config.schema import Vocabulary
from adlm.data.prepare.shards import Extent, ShardWriter, Tokens
from adlm.data.rows.packing import DOCUMENTS_PER_BATCH, rows_of
from adlm.errors import UserError

FRAMED = Vocabulary(size=100, mask_id=99, bos_id=1, eos_id=2, pad_id=0)
BARE = Vocabulary(size=28, mask_id=27)


def documents_like(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, 27) for _ in range(draws.randrange(longest + 1))] for _ in range(num)]


def stored(folder, documents, vocabulary, shard=16) -> Tokens:
    """A split of the documents, in files so small that rows cross them."""
    writer = ShardWriter(folder, np.dtype(np.uint16), Extent(), shard)
    eos = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
    for document in documents:
        ids = document + eos
        writer.append(np.array(ids, np.uint16), [len(ids)])
    return Tokens(folder, np.dtype(np.uint16), writer.extent, shard)


def stream(documents, vocabulary) -> list[int]:
    eos = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
    return [index for document in documents for index in (*document, *eos)]


@pytest.mark.parametrize("vocabulary", [FRAMED, BARE], ids=["framed", "bare"])
@pytest.mark.parametrize("num", [1, 7, 50])
def test_packed_rows_hold_every_token_once_in_order(tmp_path, vocabulary, num):
    documents = [[5, 6, 7], *documents_like(num, 12)]
    rows = rows_of(stored(tmp_path, documents, vocabulary), vocabulary, 8, "packed")
    x, pad = rows.read(range(len(rows)))
    pad = np.zeros(x.shape, bool) if pad is None else pad
    frame = 0 if vocabulary.bos_id is None else 1
    held = []
    for row, hidden in zip(x, pad, strict=True):
        text = row[~hidden].tolist()
        if frame:
            assert text[0] == vocabulary.bos_id
            assert text[-1] == vocabulary.eos_id
        held += text[frame : len(text) - frame]
    assert held == stream(documents, vocabulary)
    assert rows.num_tokens == len(held)
    assert not pad[:-1].any()
    assert (x[pad] == (vocabulary.pad_id or 0)).all()


def test_overlap_fills_the_last_row_with_the_ids_before_it(tmp_path):
    documents = documents_like(9, 12)
    tokens = stored(tmp_path, documents, FRAMED)
    rows, padded = (rows_of(tokens, FRAMED, 8, "packed", overlap=overlap) for overlap in (True, False))
    x, pad = rows.read(range(len(rows)))
    assert pad is None
    assert len(rows) == len(padded)
    assert x[-1, 1:-1].tolist() == stream(documents, FRAMED)[-6:]


def test_a_corpus_smaller_than_a_row_is_one_padded_row(tmp_path):
    rows = rows_of(stored(tmp_path, [[5, 6]], FRAMED), FRAMED, 16, "packed", overlap=True)
    x, pad = rows.read([0])
    assert x[0, :5].tolist() == [1, 5, 6, 2, 2]
    assert pad[0].tolist() == [False] * 5 + [True] * 11


@pytest.mark.parametrize("num", [1, 999, 1000, 1001, 2500])
def test_published_packing_cuts_each_thousand_documents_and_drops_remainders(tmp_path, num):
    documents = documents_like(num, 6)
    documents[0] = list(range(3, 20))
    rows = rows_of(stored(tmp_path, documents, FRAMED, shard=1000), FRAMED, 10, "packed-published")
    expected = []
    for first in range(0, num, DOCUMENTS_PER_BATCH):
        joined = stream(documents[first : first + DOCUMENTS_PER_BATCH], FRAMED)
        for start in range(0, len(joined) // 8 * 8, 8):
            expected.append([1, *joined[start : start + 8], 2])
    x, pad = rows.read(range(len(rows)))
    assert pad is None
    assert x.tolist() == expected


def test_published_packing_of_too_little_text_says_why(tmp_path):
    tokens = stored(tmp_path / "train", [[5, 6], [7]], FRAMED)
    with pytest.raises(
        UserError,
        match=r"split train: 5 tokens in 2 documents fill no row of length 1024 .*; try data.packing=packed",
    ):
        rows_of(tokens, FRAMED, 1024, "packed-published")


def test_padded_rows_are_documents_cut_at_the_row(tmp_path):
    documents = [[5, 6], [], list(range(3, 20))]
    rows = rows_of(stored(tmp_path, documents, FRAMED), FRAMED, 8, "padded")
    x, pad = rows.read([0, 1, 2])
    assert x.tolist() == [[1, 5, 6, 2, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0], [1, 3, 4, 5, 6, 7, 8, 2]]
    assert (~pad).sum(1).tolist() == [4, 2, 8]
    assert rows.read([2])[1] is not None, "a mask comes with every batch, so that shapes do not change"


def test_cropped_rows_start_at_random_positions(tmp_path):
    text = list(np.arange(3, 27)) * 4
    rows = rows_of(stored(tmp_path, [text], BARE), BARE, 8, "cropped")
    assert len(rows) == 6
    starts = set()
    for draw in np.linspace(0, 0.999, 40):
        x, pad = rows.read([2], [draw])
        assert pad is None
        start = next(i for i in range(32, 41) if text[i : i + 8] == x[0].tolist())
        starts.add(start)
    assert starts == set(range(32, 41))


@pytest.mark.parametrize("num", [16, 17, 20, 23, 24, 25, 31, 32, 33])
def test_the_last_cropped_row_holds_only_the_remaining_text(tmp_path, num):
    text = list(range(3, 3 + num))
    rows = rows_of(stored(tmp_path, [text], BARE), BARE, 8, "cropped")
    assert len(rows) == -(-num // 16)
    last = len(rows) - 1
    for draw in (0.0, 0.5, 0.999):
        x, pad = rows.read([last], [draw])
        found = x[0].tolist() if pad is None else x[0][~pad[0]].tolist()
        left = num - 16 * last
        assert len(found) == min(8, left)
        assert found[0] - 3 in range(16 * last, 16 * last + min(8, max(0, left - 8)) + 1)
        assert found == list(range(found[0], found[0] + len(found)))


@pytest.mark.parametrize("packing", ["packed", "packed-published", "padded", "cropped"])
@pytest.mark.parametrize("num", [3, 40, 1100])
def test_the_tokens_of_all_rows_are_counted_without_reading_them(tmp_path, packing, num):
    documents = [[5] * 9, *documents_like(num, 12)]
    rows = rows_of(stored(tmp_path, documents, FRAMED, shard=1000), FRAMED, 8, packing)
    spans = [rows.layout.span(row, 0.0) for row in range(len(rows))]
    assert rows.num_tokens == sum(stop - start for start, stop in spans)


def test_rows_are_read_in_any_order_one_or_many(tmp_path):
    rows = rows_of(stored(tmp_path, documents_like(30, 12), FRAMED), FRAMED, 8, "packed")
    x, _ = rows.read([3, 0, 3])
    assert (x[0] == x[2]).all()
    assert (x[1] == rows[0][0]).all()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_length_must_leave_room_for_text(tmp_path):
    with pytest.raises(UserError, match=r"length 2 leaves no room"):
        rows_of(stored(tmp_path, [[5]], FRAMED), FRAMED, 2, "packed")


@pytest.mark.parametrize("packing", ["packed", "padded", "packed-published", "padded-published"])
def test_the_frame_of_a_row_counts_as_tokens_in_the_published_packings_alone(tmp_path, packing):
    rows = rows_of(stored(tmp_path, documents_like(1200, 12), FRAMED, shard=1000), FRAMED, 8, packing)
    x, pad = rows.read(range(len(rows)))
    ids = np.ones_like(x, bool) if pad is None else ~pad
    counted = rows.counted(x, pad)
    if packing.endswith("-published"):
        assert (counted == ids).all()
    else:
        assert counted.sum() == ids.sum() - 2 * len(rows) == rows.num_tokens
        assert not counted[:, 0].any()
    parts = [text.sum() for _, text in rows.in_parts(7)]
    assert sum(parts) == counted.sum()
