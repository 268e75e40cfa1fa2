"""Laws of `adlm bench`."""

import json

import pytest
import torch

from adlm.interfaces.cli import main

SMALL = ["model.hidden=16", "model.heads=2", "model.blocks=1", "length=8"]
SMALL += ["vocabulary.size=12", "vocabulary.mask_id=11"]


def test_a_small_training_step_is_measured_on_the_host(capsys):
    words = ["bench", "train", "owt/adlm", *SMALL, "--batch", "2", "--steps", "2", "--no-compile", "--device", "cpu"]
    assert main([*words, "--profile"]) == 0
    told = capsys.readouterr().out
    assert "tokens/s on cpu, not compiled" in told
    assert "matrix products" in told
    assert main([*words, "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)
    assert speed["tokens_a_step"] == 16
    assert speed["peak_gib"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--steps", "-1"], "--steps -1 must be at least 1"),
        (["--device", "tpu"], "--device tpu is not one that is measured"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    assert main(["bench", "train", "owt/adlm", *SMALL, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_said(capsys):
    assert main(["bench", "train", "owt/adlm", *SMALL, "--device", "cuda"]) == 2
    assert "no CUDA device here; use cpu" in capsys.readouterr().err
