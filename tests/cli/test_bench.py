"""Tests of `adlm bench`."""

import json

import pytest
import torch
from small_models import small_model

from adlm.cli.main import main

SMALL = ["model.hidden=16", "model.heads=2", "model.blocks=1", "length=8"]
SMALL += ["vocabulary.size=12", "vocabulary.mask_id=11"]


def test_a_small_training_step_is_measured_on_the_cpu(capsys):
    words = ["bench", "train", "owt/adlm", *SMALL, "--batch", "2", "--steps", "2", "--no-compile", "--device", "cpu"]
    assert main([*words, "--profile"]) == 0
    captured = capsys.readouterr()
    assert "tokens/s on cpu, not compiled" in captured.out
    assert "matrix products" in captured.out
    assert captured.err.startswith("timing a small step to estimate the duration\nabout ")
    assert "s on this CPU with 1 thread" in captured.err
    assert main([*words, "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)
    assert speed["tokens_a_step"] == 16
    assert speed["peak_gib"] is None


def test_a_preset_whose_tokenizer_is_not_trained_yet_is_measured_by_its_vocabulary_size(capsys):
    small = ["model.hidden=8", "model.heads=2", "length=8", "--batch", "2", "--steps", "1", "--no-compile"]
    assert main(["bench", "train", "quickstart/adlm", *small, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_a_step"] == 16


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--steps", "-1"], "--steps -1 must be at least 1"),
        (["--device", "tpu"], "--device tpu is not supported by adlm bench; use cuda or cpu"),
    ],
)
def test_a_user_error_is_one_line(capsys, words, sentence):
    assert main(["bench", "train", "owt/adlm", *SMALL, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_a_user_error(capsys):
    assert main(["bench", "train", "owt/adlm", *SMALL, "--device", "cuda"]) == 2
    assert "--device 'cuda' is not one that torch sees here; try cpu" in capsys.readouterr().err


def sampling_speed(capsys, *words):
    assert main(["bench", "sample", *map(str, words), "--repeats", "1", "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sampling_is_measured_and_its_network_calls_are_counted(capsys):
    words = ["owt/adlm", *SMALL, "sampling.sampler=ancestral", "sampling.steps=64", "--batch", "2"]
    fast, plain = sampling_speed(capsys, *words), sampling_speed(capsys, *words, "--plain")
    assert fast["network_calls"] <= 8  # a row of 8 masks has at most 8 steps that reveal one
    assert plain["network_calls"] >= 64  # every step; one more if a mask is left
    for speed in (fast, plain):
        assert speed["seconds_per_sequence"] * 2 == pytest.approx(speed["seconds"])
        assert speed["milliseconds_a_call"] * speed["network_calls"] == pytest.approx(1e3 * speed["seconds"])
        assert speed["tokens_per_second"] == pytest.approx(16 / speed["seconds"])
        assert (speed["device"], speed["dtype"], speed["graphs"]) == ("cpu", "float32", False)


def test_with_stale_anchors_the_calls_are_those_of_the_denoiser_and_there_is_no_plain_form(capsys):
    words = ["owt/adlm", *SMALL, "model.time_conditioning=false", "time.steps=4", "sampling.steps=4"]
    words += ["sampling.sampler=ancestral", "sampling.anchor_every=2", "--batch", "2"]
    assert 0 < sampling_speed(capsys, *words)["network_calls"] <= 4
    assert main(["bench", "sample", *words, "--plain"]) == 2
    assert "--plain runs both networks at every step, and sampling.anchor_every is 2" in capsys.readouterr().err


def test_with_memory_there_is_no_plain_form(capsys):
    words = ["owt/mdlm", *SMALL, "model.time_conditioning=false", "model.memory=true", "sampling.steps=4"]
    words += ["sampling.sampler=ancestral", "--batch", "2"]
    assert 0 < sampling_speed(capsys, *words)["network_calls"] <= 4
    assert main(["bench", "sample", *words, "--plain"]) == 2
    assert "--plain has no memory of the step before, and model.memory is true" in capsys.readouterr().err


def test_autoregressive_sampling_makes_one_network_call_per_token_except_bos_with_and_without_the_kv_cache(
    capsys, tmp_path
):
    small_model(tmp_path / "ar", "ar")
    for words in ((), ("--plain",)):
        assert sampling_speed(capsys, tmp_path / "ar", "--length", 5, *words)["network_calls"] == 4


def test_sampling_speed_is_printed_as_text(capsys, tmp_path):
    small_model(tmp_path / "model")
    words = ["bench", "sample", str(tmp_path / "model"), "sampling.sampler=remdm-cap", "--repeats", "1"]
    assert main([*words, "--device", "cpu", "--batch", "3", "sampling.steps=6"]) == 0
    captured = capsys.readouterr()
    assert "s per sequence of 16 tokens" in captured.out
    assert "batch size 3" in captured.out
    assert "adlm with remdm-cap, 6 steps, on cpu in float32, no CUDA graphs" in captured.out
    assert captured.err.startswith("timing a small step to estimate the duration\nabout ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["owt/adlm", *SMALL, "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["owt/adlm", *SMALL, "--length", "9"], "the canvas is 9 tokens long and the model was made for length 8"),
        (["owt/adlm", *SMALL, "--length", "9", "--plain"], "the canvas is 9 tokens long"),
        (
            ["owt/adlm", *SMALL, "--steps", "9"],
            "unrecognized arguments: --steps 9; as a config option: time.steps=... or",
        ),
        (["owt/adlm", *SMALL, "sampling.sampler=margin", "--plain"], "sampling.sampler margin does not have"),
        (["owt/adlmm"], "there is no preset 'owt/adlmm'"),
    ],
)
def test_a_user_error_of_bench_sample_is_one_line(capsys, words, sentence):
    assert main(["bench", "sample", *words, "--device", "cpu"]) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert sentence in error
    assert before in ([], ["timing a small step to estimate the duration"])


def test_compilation_follows_the_config_by_default(capsys):
    """quickstart/adlm sets train.compile=off, so nothing is compiled without --compile."""
    small = ["model.hidden=16", "length=8", "tokenizer=bytes", "--batch", "2", "--steps", "1", "--device", "cpu"]
    assert main(["bench", "train", "quickstart/adlm", *small]) == 0
    assert "not compiled" in capsys.readouterr().out
