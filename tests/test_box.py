"""The model in the box: it loads without a path, is what commands use without a MODEL, and knows English."""

import json
from pathlib import Path

import pytest
import torch

import adlm
from adlm.cli.main import main
from adlm.config.load import BOX_FOLDER
from adlm.models.transformer import num_parameters
from adlm.samples_file import summarize_model

SENTENCE = "The old man looked at the sea and said nothing."


@pytest.fixture(scope="module")
def box():
    return adlm.load()


def test_it_loads_without_a_path_and_is_small(box):
    assert box.config.method == "adlm"
    assert num_parameters(box.network) < 7_000_000
    assert sum(path.stat().st_size for path in BOX_FOLDER.iterdir()) < 14_000_000
    weights = next(box.network.parameters())
    assert weights.dtype == torch.float32, "half precision is slow on a CPU"


def test_its_results_name_its_gamma_and_those_of_a_released_checkpoint_name_none(box):
    assert (summarize_model("box", box).gamma, summarize_model("box", box).tau) == (0.1, 5)
    path = Path(__file__).parent / "parity" / "golden" / "adlm-tiny.ckpt"
    released = summarize_model(str(path), adlm.load(path))
    assert (released.gamma, released.tau) == (None, None), "the file does not say; the defaults would be a guess"


def test_it_prefers_sentences_to_their_words_in_alphabetical_order(box):
    shuffled = " ".join(sorted(SENTENCE.split()))
    assert box.perplexity(SENTENCE, samples=1).nats < box.perplexity(shuffled, samples=1).nats - 1


@pytest.mark.parametrize(
    "words",
    [
        ["box", "--steps", "4"],
        ["--steps", "4", "box"],
        ["--steps", "4"],
        ["sampling.steps=4"],
        ["--seed", "0", "sampling.steps=4"],
        [str(BOX_FOLDER), "sampling.steps=4"],
    ],
)
def test_commands_use_it_without_a_model(box, words, capsys):
    assert main(["sample", *words, "--length", "16", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert [text] == box.sample(1, 16, steps=4, seed=0)


def test_a_folder_called_box_is_given_by_its_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "box").mkdir()
    monkeypatch.chdir(tmp_path)
    assert adlm.load("box").config.method == "adlm"
    assert main(["sample", "./box/"]) == 2
    assert "model.safetensors" in capsys.readouterr().err
