"""Tests of `adlm plan`: plans agree with what was measured, and say what to change."""

import json
import resource
import time
from pathlib import Path

import pytest
from small_runs import corpus

from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.methods import method_of
from adlm.models.transformer import num_parameters, on_meta
from adlm.tokens import with_vocabulary


def planned(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "gib", "tokens_per_second"),
    [
        (["owt/adlm", "train.batch_size=32"], 23.4, 313_748),
        (["owt/adlm", "train.batch_size=64"], 40.9, 332_478),
        (["owt/mdlm", "train.batch_size=32"], 15.2, 520_358),
    ],
)
def test_plans_are_within_15_percent_of_measured_runs(capsys, words, gib, tokens_per_second):
    """Measured on one H200: benchmarks/README.md."""
    found = planned(capsys, *words, "--gpu", "h200")
    assert found["total_gib"] == pytest.approx(gib, rel=0.15)
    assert found["total_gib"] == pytest.approx(sum(found["gib"].values()))
    assert found["tokens_per_second"] == pytest.approx(tokens_per_second, rel=0.15)
    assert found["days"] == pytest.approx(1e6 * int(words[1][17:]) * 1024 / found["tokens_per_second"] / 86_400)
    assert found["fits"]


def test_fsdp_holds_gathered_weights_too(capsys):
    """Measured on one H200 in a mesh of one process, where all weights stay gathered: experiments/train_gpu/log.txt."""
    found = planned(capsys, "owt/adlm", "train.batch_size=64", "--gpus", "2", "--gpu", "h200", "--efficiency", "1")
    assert found["total_gib"] == pytest.approx(24.41, rel=0.15)
    assert found["tokens_per_second"] == pytest.approx(2 * 229_533, rel=0.15)


def test_every_measurement_is_met_to_15_percent(capsys):
    assert main(["plan", "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) > 10
    assert max(abs(row["memory_error"]) for row in found) < 0.15
    assert max(abs(row["speed_error"]) for row in found if row["speed_error"] is not None) < 0.15
    assert main(["plan", "--check"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(found)
    assert table in (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


def test_the_text_names_its_assumptions(capsys):
    assert main(["plan", "owt/adlm", "--gpus", "64", "--gpu", "h100", "--efficiency", "0.8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("adlm on 64 x H100 SXM 80 GB: extrapolated from measurements on one H200\n")
    for part in ("weights", "optimizer", "EMA", "activations", "logits", "workspace", "total"):
        assert f"\n  {part} " in text
    assert "\nit fits\n" in text
    assert "--efficiency 0.8: what communication leaves of the speed" in text
    assert "on one H200 the memory is off by at most" in text


def test_a_run_that_does_not_fit_is_told_what_to_change_and_then_fits(capsys):
    words = ["owt/mdlm", "model=1b", "--gpus", "8", "--gpu", "h100"]
    found = planned(capsys, *words)
    assert not found["fits"]
    assert found["fits_with"]
    assert main(["plan", *words]) == 0
    assert f"it does NOT fit; with {' '.join(found['fits_with'])} it does: " in capsys.readouterr().out
    assert planned(capsys, *words, *found["fits_with"])["fits"]


def test_a_model_that_fits_in_no_way_is_said_to(capsys):
    assert main(["plan", "owt/adlm", "model=7b", "--gpu", "rtx4090"]) == 0
    assert "it does NOT fit, with no train.micro_batch" in capsys.readouterr().out
    assert planned(capsys, "owt/adlm", "model=7b", "--gpu", "rtx4090")["fits_with"] is None


def test_a_model_of_7b_is_planned_in_seconds_with_little_memory(capsys):
    planned(capsys, "owt/mdlm")  # imports
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = planned(capsys, "owt/mdlm", "model=7b", "recipe/sharded", "--gpus", "64")
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert found["fits"]
    assert 6.5e9 < found["parameters"] < 7.5e9
    config = with_vocabulary(resolve(["owt/mdlm", "model=7b"]))
    assert found["parameters"] == num_parameters(on_meta(method_of(config).build))


def test_memory_falls_with_sharding_and_recomputation_and_grows_with_the_micro_batch(capsys):
    words = ["owt/mdlm", "model=1b", "train.batch_size=512", "--gpus", "8"]
    plain = planned(capsys, *words, "train.micro_batch=8")
    sharded = planned(capsys, *words, "train.micro_batch=8", "train.shard=8")
    for part in ("weights", "optimizer", "EMA"):
        assert sharded["gib"][part] == pytest.approx(plain["gib"][part] / 8)
    recomputed = planned(capsys, *words, "train.micro_batch=8", "train.recompute=true")
    assert recomputed["gib"]["activations"] < plain["gib"]["activations"] / 4
    large = planned(capsys, *words, "train.micro_batch=64")
    assert large["gib"]["activations"] == pytest.approx(8 * plain["gib"]["activations"])
    assert planned(capsys, *words, "train.recompute=true")["tokens_per_second"] < large["tokens_per_second"]


def test_lora_has_gradients_and_moments_of_what_is_trained_only(capsys):
    words = ["owt/mdlm", "train.batch_size=8", "--gpu", "h200"]
    found = planned(capsys, *words, "train.lora_rank=8")
    assert found["trained"] < found["parameters"] / 20
    assert found["gib"]["optimizer"] == pytest.approx(2 * found["trained"] * 4 / 2**30)


def test_the_vocabulary_is_that_of_the_prepared_text(tmp_path, capsys):
    prepared = corpus(tmp_path, lines=50)  # bytes, where the preset has 2,048 symbols
    found = planned(capsys, "own", f"data.prepared={prepared}")
    assert found["parameters"] == planned(capsys, "own", "tokenizer=bytes")["parameters"]
    assert found["parameters"] < planned(capsys, "own")["parameters"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["owt/adlm", "--gpu", "h10"], "--gpu 'h10' is not one of"),
        (["owt/adlm", "--gpus", "0"], "--gpus 0 must be at least 1"),
        (["owt/adlm", "--efficiency", "2"], "--efficiency 2.0 must be at most 1"),
        (["owt/adlm", "train.shard=8", "--gpus", "12"], "train.shard 8 does not fit 12 processes"),
        (["owt/adlm", "--gpus", "3"], "train.batch_size 512 is not a multiple of 3 processes"),
        ([], "no preset or option is given; try `adlm plan owt/adlm --gpus 8`"),
        (["owt/adlm", "--check"], "--check takes no config; leave out owt/adlm"),
        (["own", "data.prepared=none"], "none has no manifest.json"),
        (["gsm8k/gpt2"], "adlm plan is for `adlm train`, and reason.method acot is another command's"),
    ],
)
def test_a_user_error_is_one_line(capsys, words, sentence):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
