"""Judges and featurisers give the same results on a GPU as on a CPU."""

import json

import numpy as np
import pytest
import torch
from judges import tiny_gpt2
from small_models import small_model
from texts import prose

import adlm
from adlm.apps.judge.generative_perplexity import token_nats, window_layout
from adlm.apps.judge.judges import HuggingFaceFeaturiser, HuggingFaceJudge, judge_of
from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TEXTS = [
    "We the people",
    "of",
    "",
    "!",
    "the United States<|endoftext|>in order",
    *(prose(9, seed) for seed in range(7)),
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Untrained models, and samples of one of them."""
    folder = tmp_path_factory.mktemp("gpu")
    for method in ("adlm", "ar", "a2r"):
        small_model(folder / method, method, length=32)
    words = ["--num", "40", "--device", "cpu", "--out", str(folder / "samples.jsonl")]
    assert main(["sample", str(folder / "adlm"), *words]) == 0
    (folder / "texts.txt").write_text("".join(prose(4, seed).replace("\n", " ") + "\n" for seed in range(50)))
    return folder


@pytest.fixture(scope="module")
def gpt2(place):
    return tiny_gpt2(place / "gpt2-tiny")


def assert_the_same_nats(judges):
    """Including texts longer than the context, in batches with and without padding."""
    assert [judge.about.device for judge in judges] == ["cpu", "cuda"]
    assert {judge.about.dtype for judge in judges} == {"float32"}
    assert judges[0].about.weights == judges[1].about.weights
    rows = judges[0].encode(TEXTS)
    assert max(map(len, rows)) > judges[0].about.context
    for batch in (1, 3, 64):
        there, here = (
            token_nats(judge, rows, batch, window_layout(judge.about, "given", judge.about.context)) for judge in judges
        )
        for ours, theirs in zip(there, here, strict=True):
            assert theirs.dtype == np.float32
            np.testing.assert_allclose(theirs, ours, **CLOSE)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_the_nats_of_our_judge_are_the_same_on_gpu_and_cpu(place, method):
    assert_the_same_nats([judge_of(str(place / method), device) for device in (CPU, CUDA)])


def test_the_nats_of_a_hub_judge_are_the_same_on_gpu_and_cpu(gpt2):
    assert_the_same_nats([HuggingFaceJudge(str(gpt2), device) for device in (CPU, CUDA)])


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_features_on_a_gpu_are_those_on_a_cpu(gpt2, pooling, batch):
    texts = [text for text in TEXTS if text]
    there, here = (HuggingFaceFeaturiser(str(gpt2), device, pooling).features(texts, batch) for device in (CPU, CUDA))
    assert here.dtype == np.float32
    np.testing.assert_allclose(here, there, **CLOSE)


def cards(capsys, *words):
    for device in ("cpu", "cuda"):
        assert main(["judge", *map(str, words), "--device", device, "--json"]) == 0
        yield json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("judge", ["ar", "gpt2-tiny"])
def test_a_card_made_on_a_gpu_is_that_of_a_cpu(place, gpt2, capsys, judge):
    words = (place / "samples.jsonl", "--model", place / judge, "--metrics", "perplexity,entropy,diversity")
    there, here = cards(capsys, *words, "--reference", place / "texts.txt", "--judge-reference")
    for ours, theirs in ((there, here), (there["reference_judged"], here["reference_judged"])):
        assert theirs["perplexity"]["judge"]["device"] == "cuda"
        for convention in ("pooled", "of_mean_nats", "mean_of_perplexities"):
            found, expected = (each["perplexity"][convention] for each in (theirs, ours))
            assert found == pytest.approx(expected, rel=1e-4)
    assert (here["entropy"], here["diversity"]) == (there["entropy"], there["diversity"])


def test_mauve_of_features_made_on_a_gpu_is_that_of_a_cpu(place, gpt2, capsys):
    pytest.importorskip("mauve", reason="mauve-text is not installed")
    words = (place / "samples.jsonl", "--features", gpt2, "--reference", place / "texts.txt", "--metrics", "mauve")
    there, here = cards(capsys, *words, "--seeds", 2)
    assert here["mauve"]["featuriser"]["device"] == "cuda"
    assert here["mauve"]["value"] == pytest.approx(there["mauve"]["value"], abs=0.05)  # a text may change its cluster


def test_a_damaged_judge_is_rejected_on_a_gpu_too(place, capsys, tmp_path):
    lm = adlm.load(place / "ar")
    weights = {name: value * float("nan") for name, value in lm.network.state_dict().items()}
    save_model_folder(ModelFolder(lm.config, weights, lm.tokenizer), tmp_path / "nan")
    words = [place / "samples.jsonl", "--model", tmp_path / "nan", "--metrics", "perplexity", "--device", "cuda"]
    assert main(["judge", *map(str, words)]) == 2
    assert "holds a NaN or an infinity" in capsys.readouterr().err
