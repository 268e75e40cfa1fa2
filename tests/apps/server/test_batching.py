"""Rows of a batch do not depend on each other, for every method; texts are cut correctly."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import mostly_slow, small_model

import adlm
from adlm.checkpoints.model_folder import load_model_folder, save_model_folder
from adlm.tokens import load_tokenizer, train_bpe

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import PATIENCE

from adlm.apps.server.batching import BatchWorker, Job, RowUpdate
from adlm.apps.server.completion import Choice
from adlm.canvas import Canvas
from adlm.sampling.events import JoinedRows
from adlm.sampling.rng import RowRng
from adlm.sampling.settings import SampleSettings


class NoMonitor:
    def queue_changed(self, model, num_rows):
        """Not counted."""

    def running_changed(self, model, num_rows):
        """Not counted."""

    def call_done(self, model, num_rows, seconds):
        """Not counted."""


def planned(lm, ids, sampling, seed, number=0):
    """A run of one row."""
    return lm.plan(SampleSettings(sampling, canvas=Canvas(torch.tensor([ids]))), RowRng(seed, [number]))


def sample(worker, rows):
    """The complete updates of the rows, in order."""
    done, all_done = {}, threading.Event()

    def notify(update: RowUpdate):
        assert update.error is None
        if update.complete:
            done[update.row] = update
            if len(done) == len(rows):
                all_done.set()

    worker.submit(Job(rows, notify, streams=True))
    assert all_done.wait(PATIENCE)
    return [done[row] for row in range(len(rows))]


REQUESTS = [
    ("adlm", 0, {"sampler": "ancestral", "steps": 16, "top_p": 0.9}),
    ("adlm", 0, {"sampler": "ancestral", "steps": 16, "anchor_every": 4}),
    ("adlm", 0, {"sampler": "anchor-first", "steps": 8, "repetition_penalty": 1.2}),
    ("sedd", 0, {"sampler": "analytic", "steps": 8}),
    ("ar", 0, {"temperature": 0.7}),
    ("mdlm", 4, {"sampler": "speculative", "top_p": 0.9}),
    ("adlm", 3, {"sampler": "ancestral", "steps": 8}),
    ("mdlm", 4, {"sampler": "threshold", "threshold": 0.02}),
    ("adlm", 0, {"sampler": "remdm-conf", "steps": 8}),
    ("mdlm", 0, {"sampler": "threshold", "threshold": 0.02}),
    ("d3pm", 0, {"sampler": "ancestral", "steps": 8}),
    ("a2r", 0, {"top_k": 40}),
    ("adlm", 4, {"sampler": "remdm-cap", "steps": 8}),
    ("mdlm", 4, {"sampler": "confidence", "steps": 2}),
]


@pytest.mark.parametrize(("method", "block_length", "options"), mostly_slow(REQUESTS, *REQUESTS[:6]), ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(method, block_length, options, tmp_path):
    check_alone_and_among_others(small_model(tmp_path / method, method, length=40, block_length=block_length), options)


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_a_row_of_a_model_with_memory_has_the_same_bits_alone_and_among_others(sampler, tmp_path):
    folder = small_model(tmp_path / "memory", "mdlm", length=40, memory=True)
    check_alone_and_among_others(folder, {"sampler": sampler, "steps": 8})


def check_alone_and_among_others(folder, options):
    lm = adlm.load(folder)
    worker = BatchWorker("model", lm, 3, 100, NoMonitor())
    worker.start()
    sampling, cached = lm.sampling(**options), lm.method.cached
    rows = []
    for number in range(7):
        ids = [65 + number] * (3 if cached else 1 + number) + [lm.mask_id] * (25 - 2 * number)
        rows.append(planned(worker.lm, [*lm.bos_prefix(ids), *ids], sampling, seed=number % 3, number=number))
    together = sample(worker, rows)
    assert [sample(worker, [row])[0] for row in rows] == [RowUpdate(0, each.ids, each.chance) for each in together]
    assert len({tuple(each.ids) for each in together}) == 7
    worker.stop()
    worker.join()


@pytest.mark.parametrize("sampler", ["speculative", "remdm-cap"])
def test_holes_of_a_block_causal_model_have_the_same_bits_alone_and_among_others(sampler, tmp_path):
    plain = load_model_folder(small_model(tmp_path / "plain", length=64, block_length=4))
    config = replace(plain.config, model=replace(plain.config.model, hole_id=255))
    save_model_folder(replace(plain, config=config), tmp_path / "holes")
    lm = adlm.load(tmp_path / "holes")
    worker = BatchWorker("holes", lm, 3, 100, NoMonitor())
    worker.start()
    texts = ([65, *[lm.mask_id] * 5, 66], [65, *[lm.mask_id] * 7, 66], [67, *[lm.mask_id] * 5, 68], [65, lm.mask_id])
    sampling = lm.sampling(sampler=sampler, steps=4)
    rows = [planned(worker.lm, [256, *ids], sampling, seed=1, number=number) for number, ids in enumerate(texts)]
    together = sample(worker, rows)
    assert [sample(worker, [row])[0] for row in rows] == [RowUpdate(0, each.ids, each.chance) for each in together]
    worker.stop()
    worker.join()


@pytest.mark.parametrize("sampler", ["speculative", "remdm-cap"])
def test_holes_of_unknown_length_have_the_same_bits_alone_and_among_others(sampler, infilling):
    worker = BatchWorker("infilling", infilling, 3, 100, NoMonitor())
    worker.start()
    unknown, mask_id, sampling = [infilling.open_id] * 9, infilling.mask_id, infilling.sampling(sampler=sampler)
    texts = [[65, *unknown, 66], [65, *[mask_id] * 9, 66], [65, *unknown], [65, *unknown, 66, *[mask_id] * 5, 67]] * 4
    rows = [planned(worker.lm, [256, *ids], sampling, seed=1, number=number) for number, ids in enumerate(texts)]
    together = sample(worker, rows)
    assert [sample(worker, [row])[0] for row in rows] == [RowUpdate(0, each.ids, each.chance) for each in together]
    lengths = {each.ids[2:11].index(256) for each in together if 256 in each.ids[2:11]}
    assert len(lengths) > 2
    worker.stop()
    worker.join()


def test_rows_join_a_batch_that_has_begun_and_leave_it_before_its_end(tmp_path, monkeypatch):
    """A long row has begun when three short ones with other options come to a batch of two: they overtake it."""
    lm = adlm.load(small_model(tmp_path / "adlm", length=40))
    worker, begun, submitted = BatchWorker("adlm", lm, 2, 100, NoMonitor()), threading.Event(), threading.Event()
    step, completed, all_done = JoinedRows.step, [], threading.Event()

    def step_after_submission(rows, turn):
        begun.set()
        assert submitted.wait(PATIENCE)
        return step(rows, turn)

    def notify_as(name):
        def notify(update):
            assert update.error is None
            if update.complete:
                completed.append((name, update.ids, update.chance))
                if len(completed) == 4:
                    all_done.set()

        return notify

    monkeypatch.setattr(JoinedRows, "step", step_after_submission)
    names = ["long", "first", "second", "third"]
    options = [{"steps": 500}, {"sampler": "remdm-cap"}, {"temperature": 0.5}, {"top_p": 0.5, "final": "draw"}]
    rows = [
        planned(worker.lm, [65] * 3 + [lm.mask_id] * (29 if name == "long" else 2), lm.sampling(**each), seed=7)
        for name, each in zip(names, options, strict=True)
    ]
    worker.start()
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        worker.submit(Job([row], notify_as(name)))
        assert begun.wait(PATIENCE)
        if number == 3:
            submitted.set()
    assert all_done.wait(PATIENCE)
    assert completed[-1][0] == "long"
    alone = [sample(worker, [row])[0] for row in rows]
    assert {name: rest for name, *rest in completed} == {
        name: [each.ids, each.chance] for name, each in zip(names, alone, strict=True)
    }
    worker.stop()
    worker.join()


def test_rows_of_a_client_that_leaves_do_not_end_those_that_began_with_them(tmp_path):
    lm = adlm.load(small_model(tmp_path / "adlm", length=40))
    worker = BatchWorker("adlm", lm, 2, 100, NoMonitor())
    begun, cancelled, done = (threading.Event() for _ in range(3))

    def notify_leaving(update):
        begun.set()
        assert cancelled.wait(PATIENCE)

    [row] = rows_of(worker.lm, 1, 20, sampler="confidence", steps=20)
    leaving = Job([row], notify_leaving, streams=True, client="X")
    worker.submit(leaving)
    worker.submit(Job([row], lambda update: update.complete and done.set(), client="Y"))
    worker.start()
    assert begun.wait(PATIENCE)
    worker.cancel(leaving)
    cancelled.set()
    assert done.wait(PATIENCE)
    worker.stop()
    worker.join()


def order_of_completion(worker, jobs):
    """The names of jobs {name: (client, rows)}, submitted together, in the order they are completed."""
    left, completed, all_done = {name: len(rows) for name, (_, rows) in jobs.items()}, [], threading.Event()

    def notify_as(name):
        def notify(update):
            assert update.error is None
            left[name] -= update.complete
            if left[name] == 0:
                completed.append(name)
                if len(completed) == len(jobs):
                    all_done.set()

        return notify

    for name, (client, rows) in jobs.items():
        worker.submit(Job(rows, notify_as(name), client=client))
    worker.start()
    assert all_done.wait(PATIENCE)
    worker.stop()
    worker.join()
    return completed


def rows_of(lm, num_rows, num_masks, **options):
    ids = [65, 66, 67, *[lm.mask_id] * num_masks]
    return [planned(lm, ids, lm.sampling(**options), seed=7, number=number) for number in range(num_rows)]


@pytest.mark.parametrize("sampler", mostly_slow(("ancestral", "remdm-cap", "confidence"), "ancestral", "confidence"))
@pytest.mark.parametrize("num_masks", [25, 60], ids=["same length", "other length"])
def test_a_short_request_does_not_wait_for_the_end_of_a_long_one(models, monkeypatch, sampler, num_masks):
    monkeypatch.setattr("adlm.apps.server.batching.SHORT_SECONDS", 0.02)
    worker = BatchWorker("adlm", models["adlm"], 2, 100, NoMonitor())
    jobs = {"long": ("", rows_of(worker.lm, 8, num_masks, sampler=sampler, steps=200))}
    jobs["short"] = ("", rows_of(worker.lm, 1, 4, sampler=sampler, steps=4))
    assert order_of_completion(worker, jobs) == ["short", "long"]


def test_a_long_request_is_finished_while_short_ones_keep_coming(models, monkeypatch):
    monkeypatch.setattr("adlm.apps.server.batching.SHORT_SECONDS", 0.001)
    worker = BatchWorker("adlm", models["adlm"], 1, 200, NoMonitor())
    jobs = {"long": ("", rows_of(worker.lm, 1, 25, steps=200))}
    jobs |= {f"short {number}": ("", rows_of(worker.lm, 1, 4, steps=4)) for number in range(100)}
    assert order_of_completion(worker, jobs).index("long") < 80


def test_a_client_with_many_requests_has_no_more_turns_than_one_with_a_single_request(models):
    """Of ten equal requests, nine of them of one client, that of the other client is one of the first two."""
    worker = BatchWorker("adlm", models["adlm"], 1, 100, NoMonitor())
    jobs = {f"greedy {number}": ("greedy", rows_of(worker.lm, 1, 25, steps=100)) for number in range(9)}
    jobs["modest"] = ("modest", rows_of(worker.lm, 1, 25, steps=100))
    assert "modest" in order_of_completion(worker, jobs)[:2]


BYTES = load_tokenizer("bytes")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.sampled_from([65, 66, 0xC3, 0xA4, 0xE2, 0x82, 0xAC, 256]), st.integers(0, 256)), min_size=1),
    st.lists(st.text("AB\u00e4\u20ac", min_size=1, max_size=3), max_size=2),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_is_streamed_early_is_a_prefix_of_the_text(ids, stops, first, ends_at_eos):
    first = min(first, len(ids))
    choice = Choice(BYTES, first, len(ids), len(ids) - first, ends_at_eos, False, stops)
    text, reason = choice.text(ids, complete=True)
    assert reason in ("stop", "length")
    assert not any(stop in text for stop in stops)
    for length in range(first, len(ids) + 1):
        early, early_reason = choice.text(ids[:length], complete=False)
        assert text.startswith(early)
        assert early_reason is None or (early, early_reason) == (text, reason)


def test_a_completion_ends_at_eos_but_an_infilled_text_does_not():
    ids = [*b"Hello", *b" you", 256, *b"next"]
    completion = Choice(BYTES, 5, len(ids), 9, True, False, ())
    assert completion.text(ids, complete=True) == (" you", "stop")
    assert Choice(BYTES, 5, len(ids), 9, False, False, ()).text(ids, complete=True) == (" you\n\nnext", "length")
    after_bos = Choice(BYTES, 0, 4, 4, True, False, ())
    assert after_bos.text([256, *b"ab", 256], complete=True) == ("ab", "stop")
    assert completion.logprobs(ids, [0.5] * len(ids))["tokens"] == [" ", "y", "o", "u"]


def test_the_end_of_a_hole_of_unknown_length_is_no_part_of_the_text():
    ids = [*b"Hello", *b" you", 256, 256, *b"next", 256]
    choice = Choice(BYTES, 0, len(ids), 7, False, False, (), open=frozenset([5, 6, 7, 8, 9, 10, 15]))
    assert choice.text(ids, complete=True) == ("Hello younext", "stop")
    assert choice.num_sampled(ids) == 6, "one eos in each hole"
    assert choice.logprobs(ids, [0.5] * len(ids))["tokens"] == [chr(index) for index in ids if index < 256]
    assert choice.text(ids[:10], complete=False) == ("Hello you", None)
    cut_off = [*ids[:-1], 65]
    assert choice.text(cut_off, complete=True) == ("Hello younextA", "length")


def test_a_space_at_the_end_of_the_prompt_is_not_repeated():
    tokenizer = train_bpe(["the union of the states " * 20], 300)
    assert tokenizer.joins_spaces
    ids = tokenizer.encode("the union of")
    first = len(tokenizer.encode("the union"))
    assert Choice(tokenizer, first, len(ids), 1, True, True, ()).text(ids, True)[0] == "of"
    assert Choice(tokenizer, first, len(ids), 1, True, False, ()).text(ids, True)[0] == " of"
