"""Batches of several texts: each text has its share of every batch, loses no row, and resumes from any position."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from test_packing import FRAMED, stored

from adlm.data.rows.holes import Rearrangement
from adlm.data.rows.loader import Loader, Mixture, Position
from adlm.data.rows.packing import rows_of

WEIGHTS = (5.0, 3.0, 1.3)


@pytest.fixture
def texts(tmp_path):
    """20, 40 and 60 different rows of 8 ids; those of text i are between 3 + 30 i and 32 + 30 i."""
    found, draws = [], random.Random(0)
    for text in range(3):
        ids = [3 + 30 * text + draws.randrange(30) for _ in range(120 * (text + 1) - 1)]
        found.append(rows_of(stored(tmp_path / str(text), [ids], FRAMED, shard=64), FRAMED, 8, "packed", overlap=True))
    return found


def mixture(texts, batch_size=10, rank=0, num_ranks=1, **options):
    loaders = [Loader(rows, batch_size, 7 + text, rank, num_ranks, **options) for text, rows in enumerate(texts)]
    return Mixture(tuple(loaders), WEIGHTS, 3)


def text_of(x):
    return (x[:, 1] - 3) // 30


def test_every_batch_has_the_share_of_each_text_rounded_up_or_down(texts):
    mixed = mixture(texts)
    expected = np.array(WEIGHTS) / sum(WEIGHTS) * 10
    counts = mixed.counts(np.arange(10_000))
    assert (counts.sum(axis=1) == 10).all()
    assert ((counts == np.floor(expected)) | (counts == np.ceil(expected))).all()
    drift = counts.cumsum(axis=0) - np.arange(1, 10_001)[:, None] * expected
    assert np.abs(drift).max() < 4
    for number, batch in enumerate(islice(mixed._batches(Position()), 50)):
        assert torch.bincount(text_of(batch.x), minlength=3).tolist() == counts[number].tolist()


@pytest.mark.parametrize("num_batches", [3, 30, 77])
def test_no_row_of_a_text_comes_again_before_all_others_have_come(texts, num_batches):
    x = torch.cat([batch.x for batch in islice(mixture(texts)._batches(Position()), num_batches)])
    for text, rows in enumerate(texts):
        own = Counter(map(tuple, x[text_of(x) == text].tolist()))
        epochs, more = divmod(own.total(), len(rows))
        assert set(own) <= set(map(tuple, rows.read(range(len(rows)))[0].tolist()))
        assert sorted(own.values()) == [epochs] * (len(own) - more) + [epochs + 1] * more
        assert len(own) == (len(rows) if epochs else more)


def test_texts_are_mixed_within_a_batch(texts):
    """Over batches, the first place of a batch is as often of each text as its share says."""
    first = torch.stack([batch.x[0] for batch in islice(mixture(texts)._batches(Position()), 200)])
    found = torch.bincount(text_of(first), minlength=3) / 200
    torch.testing.assert_close(found, torch.tensor(WEIGHTS) / sum(WEIGHTS), rtol=0, atol=0.12)


def test_a_mixture_resumes_from_any_position(texts):
    batches = list(islice(mixture(texts)._batches(Position()), 60))
    for index in (0, 1, 17, 58):
        following = next(mixture(texts)._batches(Position(*tuple(batches[index].after))))
        assert torch.equal(following.x, batches[index + 1].x)
        assert following.after == batches[index + 1].after


@pytest.mark.parametrize("options", [{}, {"random_length": 0.5}, {"rearrangement": Rearrangement(0.5, 99, 2)}], ids=str)
def test_the_parts_of_all_ranks_are_the_batch_of_a_single_process(texts, options):
    whole = list(islice(mixture(texts, **options)._batches(Position()), 8))
    parts = [list(islice(mixture(texts, 10, rank, 5, **options)._batches(Position()), 8)) for rank in range(5)]
    for number, batch in enumerate(whole):
        shares = [part[number] for part in parts]
        assert torch.equal(batch.x, torch.cat([share.x for share in shares]))
        for name in ("pad", "given"):
            marks = [getattr(share, name) for share in shares]
            joined = [torch.zeros(2, 8, dtype=torch.bool) if each is None else each for each in marks]
            expected = getattr(batch, name)
            assert torch.equal(torch.cat(joined), torch.zeros(10, 8).bool() if expected is None else expected)


def test_a_text_that_pads_its_rows_marks_them_in_a_mixed_batch(texts, tmp_path):
    documents = stored(tmp_path / "short", [[3, 4, 5]] * 9, FRAMED)
    padded = rows_of(documents, FRAMED, 8, "padded")
    mixed = Mixture((Loader(texts[1], 4), Loader(padded, 4)), (1.0, 1.0))
    for batch in islice(mixed._batches(Position()), 5):
        is_short = batch.x[:, 1] == 3
        assert is_short.sum() == 2
        assert batch.pad.tolist() == [[short and place > 4 for place in range(8)] for short in is_short.tolist()]
