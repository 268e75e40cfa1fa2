"""Training runs with stale anchors of whole rows: resumption, micro-batches, validation, samples of the saved model."""

import pytest
from small_runs import corpus, logged, run

import adlm

WORDS = (
    "method=adlm",
    "sampling.anchor_every=2",
    "sampling.steps=4",
    "time.steps=4",
    "model.dropout=0",
    "anchor.warm_up=false",
    "train.precision=float64",
    "train.decay=constant",
)


def test_runs_are_the_same_for_any_micro_batch_and_resume(tmp_path):
    prepared = corpus(tmp_path, lines=100)
    run(prepared, tmp_path / "whole", *WORDS)
    run(prepared, tmp_path / "split", *WORDS, "train.micro_batch=2", "train.recompute=true")
    run(prepared, tmp_path / "resumed", *WORDS, "train.steps=10")
    run(prepared, tmp_path / "resumed", *WORDS)
    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "resumed")[-1] == whole[-1]
    assert logged(tmp_path / "split") == [pytest.approx(line, rel=1e-6) for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    lm = adlm.load(tmp_path / "whole")
    assert lm.config.sampling.anchor_every == 2
    assert len(lm.sample(3, length=8)) == 3
