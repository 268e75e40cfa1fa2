"""Training runs with memory: resumption, micro-batches, the start from a finished run, samples of the saved model."""

import pytest
import torch
from small_models import mostly_slow
from small_runs import RecordingReporter, corpus, logged, run, weights

import adlm

OWN = ("train.precision=float64", "train.decay=constant", "model.dropout=0", "anchor.warm_up=false")


@pytest.mark.parametrize("method", mostly_slow(["mdlm", "adlm"], "adlm"))
def test_runs_are_the_same_for_any_micro_batch_and_resume(tmp_path, method):
    prepared, words = corpus(tmp_path, lines=100), (f"method={method}", "model.memory=true", *OWN)
    run(prepared, tmp_path / "whole", *words)
    run(prepared, tmp_path / "split", *words, "train.micro_batch=2", "train.recompute=true")
    run(prepared, tmp_path / "resumed", *words, "train.steps=10")
    run(prepared, tmp_path / "resumed", *words)
    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "resumed")[-1] == whole[-1]
    assert logged(tmp_path / "split") == [pytest.approx(line, rel=1e-6) for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    lm = adlm.load(tmp_path / "whole")
    assert len(lm.sample(3, length=8)) == 3
    assert lm.perplexity("sun moon", samples=2).value > 1


@pytest.mark.parametrize("method", mostly_slow(["mdlm", "adlm"], "adlm"))
def test_a_finished_run_gets_a_memory_and_loses_it(tmp_path, method):
    """With a learning rate that changes nothing: a new memory is 0, so the model is the old one to the last bit."""
    prepared, still = corpus(tmp_path, lines=100), ("train.learning_rate=1e-30", "train.steps=4", "train.ema=0")
    run(prepared, tmp_path / "first", f"method={method}")
    run(prepared, tmp_path / "with", f"init={tmp_path / 'first'}", "model.memory=true", *still)
    run(prepared, tmp_path / "without", f"init={tmp_path / 'with'}", "model.memory=false", *still)
    first, with_memory, without = (weights(tmp_path / name) for name in ("first", "with", "without"))
    [new] = with_memory.keys() - first.keys()
    assert new == ("memory.weight" if method == "mdlm" else "anchor.memory.weight")
    assert with_memory[new].abs().max() < 1e-25
    assert without.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(with_memory[name], value)
        assert torch.equal(without[name], value)
    ids = [adlm.load(tmp_path / name).sample(2, length=8) for name in ("first", "with")]
    assert ids[0] == ids[1]


def test_held_out_nats_are_said_to_be_those_without_memory(tmp_path):
    prepared, reporter = corpus(tmp_path, lines=100), RecordingReporter()
    run(prepared, tmp_path / "run", "method=mdlm", "model.memory=true", "train.steps=4", reporter=reporter)
    assert any("held-out nats are those without memory" in message for message in reporter.messages)
