"""Global batches do not depend on the number of ranks, resume from any position, and skip no row."""

import pickle
import random
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from test_packing import FRAMED, documents_like, stored

from adlm.data.prepare.prepare import prepare
from adlm.data.rows.holes import Rearrangement
from adlm.data.rows.loader import START, Loader, Position, Stream, shuffle, uniform
from adlm.data.rows.packing import rows_of
from adlm.data.sources.source import resolve_source
from adlm.errors import UserError
from adlm.tokens import load_tokenizer


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1025])
def test_an_epoch_is_a_permutation(size):
    for epoch in range(3):
        assert sorted(shuffle(np.arange(size), size, 7, epoch)) == list(range(size))


def test_orders_depend_on_seed_and_epoch_and_not_on_the_requested_positions():
    size = 1000
    whole = shuffle(np.arange(size), size, 0, 0)
    assert (shuffle(np.arange(300, 310), size, 0, 0) == whole[300:310]).all()
    for seed, epoch in ((0, 1), (1, 0), (2**40, 0), (0, 2**33)):
        assert (shuffle(np.arange(size), size, seed, epoch) != whole).mean() > 0.98


def test_every_row_is_equally_likely_at_every_position():
    """Chi-square over seeds: row at place 0, and place of row 0, uniform over 16 (99.99% of 15 degrees: 44.3)."""
    size, trials = 16, 4000
    orders = np.array([shuffle(np.arange(size), size, seed, 0) for seed in range(trials)])
    for seen in (orders[:, 0], orders.argmin(1), (orders[:, 1] - orders[:, 0]) % size):
        counts = np.bincount(seen, minlength=size)
        if counts[0] == 0:  # differences are never 0
            counts = counts[1:]
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 44.3
    draws = np.concatenate([uniform(np.arange(100), seed, 0) for seed in range(100)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(draws.var() - 1 / 12) < 0.005


def test_an_order_of_a_billion_rows_needs_no_memory():
    rows = shuffle(np.array([0, 10**9 - 1, 5]), 10**9, 0, 0)
    assert ((rows >= 0) & (rows < 10**9)).all()


@pytest.fixture
def rows(tmp_path):
    return rows_of(stored(tmp_path, documents_like(60, 12), FRAMED, shard=64), FRAMED, 8, "packed", overlap=True)


def taken(loader, count, start=START):
    return list(islice(loader.batches(start), count))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_batches_of_all_ranks_are_those_of_a_single_process(rows, num_ranks):
    count = 2 * len(rows) // 12 + 2  # more than two epochs
    alone = taken(Loader(rows, 12, seed=3), count)
    shares = [taken(Loader(rows, 12, seed=3, rank=rank, num_ranks=num_ranks), count) for rank in range(num_ranks)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(whole.x, torch.cat([part.x for part in parts]))
        assert all(part.after == whole.after for part in parts)


def test_every_row_comes_once_per_epoch_and_batches_continue_across_epochs(rows):
    count = 5 * len(rows) // 12
    x = torch.cat([batch.x for batch in taken(Loader(rows, 12), count)])
    everything = sorted(rows.read(range(len(rows)))[0].tolist())
    for epoch in range(4):
        assert sorted(x[epoch * len(rows) : (epoch + 1) * len(rows)].tolist()) == everything
    assert x[: len(rows)].tolist() != x[len(rows) : 2 * len(rows)].tolist(), "another order every epoch"


def test_a_batch_larger_than_the_corpus_is_full(rows):
    batch = taken(Loader(rows, 5 * len(rows) + 1), 1)[0]
    assert len(batch.x) == 5 * len(rows) + 1
    assert batch.after == Position(5, 1)


def test_resuming_from_any_position_gives_the_next_batch(rows):
    loader = Loader(rows, 4, seed=1)
    batches = list(islice(loader._batches(Position()), 1001))
    draws = random.Random(0)
    for index in draws.sample(range(1000), 250):
        start = Position(*tuple(batches[index].after))  # two integers
        following = next(loader._batches(start))
        assert torch.equal(following.x, batches[index + 1].x)
        assert following.after == batches[index + 1].after


def test_rearranged_rows_mark_their_copies_as_given_and_do_not_depend_on_the_number_of_ranks(tmp_path):
    rows = rows_of(stored(tmp_path, [list(range(3, 99)) * 20], FRAMED, shard=64), FRAMED, 64, "packed", overlap=True)
    rearrangement = Rearrangement(0.5, 99, 2)
    [plain], [whole] = (taken(Loader(rows, 24, rearrangement=each), 1) for each in (None, rearrangement))
    assert plain.given is None
    rearranged = (whole.x == 99).any(dim=1)
    assert 0 < rearranged.sum() < 24
    assert torch.equal(whole.x[~rearranged], plain.x[~rearranged])
    assert whole.given.any(dim=1).sum() > 1
    assert not whole.given[~rearranged].any()
    parts = [taken(Loader(rows, 24, 0, rank, 2, rearrangement=rearrangement), 1)[0] for rank in range(2)]
    assert torch.equal(whole.x, torch.cat([part.x for part in parts]))
    assert torch.equal(whole.given, torch.cat([part.given for part in parts]))


def test_a_share_of_the_rows_is_cut_to_every_length_equally_often(rows):
    """Chi-square over the lengths 1, ..., 6 of the text (99.99% of 5 degrees: 25.7); other rows are as they were."""
    count, share, width = 600, 0.3, 6
    plain, cut = (taken(Loader(rows, 20, seed=2, random_length=each), count) for each in (0.0, share))
    assert all(batch.pad is None for batch in plain)
    x, whole, pad = torch.cat([b.x for b in cut]), torch.cat([b.x for b in plain]), torch.cat([b.pad for b in cut])
    lengths = (~pad).sum(dim=1) - 2
    expected = np.full(width, share / width)
    expected[-1] += 1 - share
    expected *= len(x)
    counts = np.bincount(lengths.numpy(), minlength=width + 1)
    assert counts[0] == 0
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 25.7
    place = torch.arange(8)
    text = place < 1 + lengths[:, None]
    assert torch.equal(x[text], whole[text])
    assert (x[place == 1 + lengths[:, None]] == FRAMED.eos_id).all()
    assert (x[pad] == FRAMED.pad_id).all()


def test_a_row_cut_to_a_length_is_that_of_a_shorter_length_padded(tmp_path):
    tokens = stored(tmp_path, [list(range(3, 60))], FRAMED)
    long = rows_of(tokens, FRAMED, 12, "packed")
    for kept in range(1, 11):
        [x], [pad] = long.read([0], kept=np.array([kept / 10]))
        [shorter], _ = rows_of(tokens, FRAMED, kept + 2, "packed").read([0])
        assert x[~pad].tolist() == shorter.tolist()
        assert not pad[: kept + 2].any()


def test_random_lengths_do_not_depend_on_the_number_of_ranks_and_resume(rows):
    loader, count = Loader(rows, 12, seed=3, random_length=0.5), 2 * len(rows) // 12 + 2
    alone = taken(loader, count)
    assert len({tuple(batch.pad.flatten().tolist()) for batch in alone}) == count, "drawn anew in every step and epoch"
    shares = [taken(Loader(rows, 12, 3, rank, 3, random_length=0.5), count) for rank in range(3)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(whole.x, torch.cat([part.x for part in parts]))
        assert torch.equal(whole.pad, torch.cat([part.pad for part in parts]))
    for index in range(0, count - 1, 3):
        [following] = taken(loader, 1, alone[index].after)
        assert torch.equal(following.x, alone[index + 1].x)
        assert torch.equal(following.pad, alone[index + 1].pad)


def test_crops_differ_between_epochs(tmp_path):
    documents = [list(range(3, 99)) * 20]
    rows = rows_of(stored(tmp_path, documents, FRAMED, shard=64), FRAMED, 8, "cropped")
    loader = Loader(rows, len(rows), shuffle=False)
    first, second = (batch.x for batch in taken(loader, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first, taken(loader, 1)[0].x), "and in the same place in the same epoch"
    assert not torch.equal(first, taken(Loader(rows, len(rows), seed=1, shuffle=False), 1)[0].x)


def test_a_mask_comes_only_with_the_batch_that_has_padding(tmp_path):
    rows = rows_of(stored(tmp_path, [[5] * 40], FRAMED), FRAMED, 8, "packed")
    assert [batch.pad is None for batch in taken(Loader(rows, 1, shuffle=False), len(rows))] == [True] * 6 + [False]


def test_unshuffled_rows_come_in_order(rows):
    x = torch.cat([batch.x for batch in taken(Loader(rows, 4, shuffle=False), len(rows) // 4)])
    assert x.tolist() == rows.read(range(len(x)))[0].tolist()


def test_a_batch_size_that_is_not_a_multiple_of_the_ranks_is_refused(rows):
    with pytest.raises(
        UserError, match=r"train.batch_size 10 is not a multiple of 4 processes; try train.batch_size=8"
    ):
        Loader(rows, 10, num_ranks=4)


def test_an_error_in_the_background_thread_reaches_the_consumer(rows, monkeypatch):
    monkeypatch.setattr("adlm.data.prepare.shards.Tokens.copy_to", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(Loader(rows, 4).batches())


def test_the_thread_ends_with_its_iterator(rows):
    batches = Loader(rows, 4).batches()
    next(batches)
    assert "loader" in [thread.name for thread in threading.enumerate()]
    batches.close()
    assert "loader" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.processes
def test_a_program_can_exit_in_the_middle_of_an_epoch(tmp_path):
    stored(tmp_path / "split", documents_like(60, 12), FRAMED, shard=64)
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import numpy as np
from test_packing import FRAMED
from adlm.data.rows.loader import Loader
from adlm.data.rows.packing import rows_of
from adlm.data.prepare.shards import Extent, Tokens
tokens = Tokens(Path({str(tmp_path / "split")!r}), np.dtype(np.uint16), Extent(100, 10), 64)
batches = Loader(rows_of(tokens, FRAMED, 8, "packed"), 512).batches()
next(batches)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert (run.returncode, run.stderr) == (0, "")


def test_rows_can_be_pickled_for_the_workers_of_a_torch_data_loader(rows):
    assert (pickle.loads(pickle.dumps(rows))[3][0] == rows[3][0]).all()
    collated = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2)
    x = torch.cat([x for x, pad in collated])
    assert x.tolist() == rows.read(range(len(rows)))[0].tolist()


@pytest.fixture
def source(tmp_path, bpe, resolve_config):
    """A corpus of 150 documents in three files, and its config."""
    from texts import prose

    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        lines = [prose(1 + (17 * number + 5 * i) % 23, seed=50 * number + i).replace("\n", " ") for i in range(50)]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return resolve_config(
        f"data.path={folder}", "data.boundary=line", "data.held_out=0.1", f"tokenizer={bpe}", "length=16"
    )


def streamed(config, count, start=START, **options):
    loader = Stream(resolve_source(config.data), load_tokenizer(config.tokenizer), config.length, 6, **options)
    return list(islice(loader.batches(start), count))


def test_a_stream_gives_the_prepared_rows_in_order(source, tmp_path):
    rows = prepare(source, tmp_path / "out").prepared.rows("train")
    full = len(rows) - 1
    x = torch.cat([batch.x for batch in streamed(source, full // 6 + 1)])
    assert x[:full].tolist() == rows.read(range(full))[0].tolist()


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_stream_resumes_from_any_position_across_epochs(source, resolve_config, packing):
    from dataclasses import replace

    config = replace(source, data=replace(source.data, packing=packing))
    batches = streamed(config, 100)
    assert batches[-1].after.epoch > 2 * 135, "documents of more than two epochs"
    for index in (0, 1, 7, 30, 60, 98):
        following = streamed(config, 1, batches[index].after)[0]
        assert torch.equal(following.x, batches[index + 1].x)
        assert following.after == batches[index + 1].after


def test_the_streams_of_two_ranks_are_that_of_a_single_process(source):
    alone = streamed(source, 10)
    shares = [streamed(source, 10, rank=rank, num_ranks=2) for rank in range(2)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(whole.x, torch.cat([part.x for part in parts]))


def test_a_stream_whose_length_leaves_no_room_for_text_is_refused(source):
    from dataclasses import replace

    with pytest.raises(UserError, match=r"length 2 leaves no room"):
        streamed(replace(source, length=2), 1)


def test_a_stream_excludes_the_held_out_documents(source):
    train = torch.cat([batch.x for batch in streamed(source, 30)])
    valid = torch.cat([batch.x for batch in streamed(source, 5, split="valid")])
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in valid.tolist()}
    with pytest.raises(UserError, match=r"no document in its split 'test'"):
        streamed(source, 1, split="test")
