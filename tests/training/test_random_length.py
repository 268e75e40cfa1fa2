"""Training with `train.random_length`: rows cut to random lengths, whose padding has no loss and is not attended to."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, RecordingReporter, corpus

from adlm.config.load import resolve
from adlm.errors import UserError
from adlm.training.metrics import read_metrics
from adlm.training.train import train

SHORT = (
    *SMALL,
    "train.random_length=0.5",
    "train.threads=1",
    "train.checkpoint_every=3",
    "train.valid_every=0",
    "model.dropout=0",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def run(out, prepared, *words):
    return train(resolve([f"data.prepared={prepared}", *SHORT, *words]), out, RecordingReporter())


def weights(folder):
    return load_file(folder / "model/model.safetensors")


@pytest.mark.parametrize("words", [["method=adlm"], ["method=mdlm", "time.masks=counted", "time.weight=one"]], ids=str)
def test_a_run_resumes_to_the_same_bits_and_is_the_same_for_any_micro_batch(words, prepared, tmp_path):
    whole = run(tmp_path / "whole", prepared, *words, "train.steps=6")
    run(tmp_path / "parts", prepared, *words, "train.steps=3")
    resumed = run(tmp_path / "parts", prepared, *words, "train.steps=6")
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed.counters.tokens == whole.counters.tokens
    run(tmp_path / "micro", prepared, *words, "train.steps=6", "train.micro_batch=1", "train.precision=float64")
    run(tmp_path / "plain", prepared, *words, "train.steps=6", "train.precision=float64")
    by_one, by_eight = weights(tmp_path / "micro"), weights(tmp_path / "plain")
    for name in by_eight:
        torch.testing.assert_close(by_one[name], by_eight[name], rtol=1e-6, atol=1e-8)


def test_padding_is_never_predicted(prepared, tmp_path):
    """Tokens are counted without padding: of 8 rows of 16 a step, half are cut to 1 to 14 tokens of text, and 2."""
    outcome = run(tmp_path / "run", prepared, "method=mdlm", "train.steps=40", "train.log_every=1")
    tokens = [line["tokens"] for line in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert outcome.counters.tokens == tokens[-1]
    assert tokens[-1] / (40 * 8 * 16) == pytest.approx(1 - 0.5 * 6.5 / 16, abs=0.03)
    assert len({after - before for before, after in pairwise(tokens)}) > 10


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data.packing=padded"], r"cuts packed rows, and those of data\.packing padded have the lengths of their"),
        (["data.pad=attended"], r"a shorter canvas has no padding to attend to; use data\.pad=masked"),
        (["method=ar"], r"is for methods that read whole rows, and ar writes from left to right"),
        (["model.block_length=4"], r"whole rows, and model\.block_length 4 writes from left to right"),
    ],
    ids=["padded", "attended", "ar", "blocks"],
)
def test_rows_that_cannot_be_cut_are_refused_before_the_run_starts(words, sentence, prepared, tmp_path):
    with pytest.raises(UserError, match=sentence):
        run(tmp_path / "run", prepared, "method=mdlm", *words)
    assert not (tmp_path / "run/config.yaml").exists()


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("sun and moon " * 500, ["data.streaming=true"], r"cuts prepared rows; use data\.streaming=false"),
        ('{"prompt": "sun", "answer": "moon"}\n' * 40, ["data.format=pairs"], r"cuts running text, and answers end"),
    ],
    ids=["stream", "pairs"],
)
def test_streams_and_answers_are_not_cut(text, words, sentence, tmp_path):
    path = tmp_path / ("text.jsonl" if text.startswith("{") else "text.txt")
    path.write_text(text)
    config = resolve([f"data.path={path}", "tokenizer=bytes", "method=mdlm", *SHORT, *words])
    with pytest.raises(UserError, match=r"train\.random_length 0\.5 " + sentence):
        train(config, tmp_path / "run", RecordingReporter())
