"""Tests of training models with an order of their own: resumption, micro-batches, what is saved."""

import pytest
import torch
from small_models import mostly_slow
from small_runs import corpus, logged, run

import adlm

WORDS = (
    "time.masks=counted",
    "model.dropout=0",
    "anchor.warm_up=false",
    "train.precision=float64",
    "train.decay=constant",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("rates"), lines=100)


@pytest.mark.parametrize(("method", "rule"), mostly_slow([("mdlm", "tokens"), ("adlm", "text")], ("adlm", "text")))
def test_runs_are_the_same_for_any_micro_batch_and_resume(tmp_path, prepared, method, rule):
    words = [f"method={method}", f"rates.rule={rule}", *WORDS]
    run(prepared, tmp_path / "whole", *words)
    run(prepared, tmp_path / "split", *words, "train.micro_batch=2", "train.recompute=true")
    run(prepared, tmp_path / "resumed", *words, "train.steps=10")
    run(prepared, tmp_path / "resumed", *words)
    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "resumed")[-1] == whole[-1]
    assert logged(tmp_path / "split") == [pytest.approx(line, rel=1e-6) for line in whole]
    assert whole[-1]["order"] > 0
    assert whole[-1]["loss"] < whole[0]["loss"]
    lm = adlm.load(tmp_path / "whole")
    assert len(lm.sample(2, length=8, sampler="rates", steps=8)) == 2


def test_anchors_have_their_rate_in_the_saved_model(tmp_path, prepared):
    words = ["method=mdlm", "rates.rule=anchors", "rates.strength=3", "anchor.rule=pattern", "anchor.pattern=[qk]"]
    run(prepared, tmp_path / "run", *words, *WORDS)
    lm = adlm.load(tmp_path / "run")
    rates = lm.network.text_rates(torch.tensor([[*b"king queen"]])).log_rates.exp()
    expected = torch.tensor([[3.0 if each in b"kq" else 1.0 for each in b"king queen"]])
    torch.testing.assert_close(rates, expected.to(rates))
