"""The tokenizer of a samples file: that of the model, never one that merely decodes the ids to the same text."""

from dataclasses import replace

import pytest
from small_models import small_model
from texts import prose

from adlm.cli.main import main
from adlm.errors import UserError
from adlm.evaluation.generation.sample_tokenizer import decodes_to_text, find_sample_tokenizer
from adlm.samples_file import Sample, read_samples
from adlm.tokens import load_tokenizer, symbols_sha256, train_bpe


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    small_model(folder / "model", "mdlm", tokenizer="text8")
    assert main(["sample", str(folder / "model"), "--num", "3", "--out", str(folder / "samples.jsonl")]) == 0
    return read_samples(folder / "samples.jsonl")


@pytest.fixture(scope="module")
def unrecorded(file):
    """The first line of a file without the sha256 of its tokenizer."""
    return replace(file.made_by, tokenizer_sha256=None)


TEXT8 = load_tokenizer("text8").sha256


def test_a_larger_tokenizer_decodes_the_ids_of_a_smaller_one_but_has_another_sha256():
    texts = [prose(400, seed) for seed in range(4)]
    small, large = train_bpe(texts, 300), train_bpe(texts, 360)
    text = prose(20, 9)
    sample = Sample(0, 0, 0, text, small.encode(text))
    assert decodes_to_text(large, sample)
    assert large.encode(text) != sample.ids
    assert small.sha256 != large.sha256
    assert small.sha256 == train_bpe(texts, 300).sha256


def test_the_mask_does_not_change_the_sha256():
    vocabulary = load_tokenizer("bytes").engine.get_vocab()
    assert "[MASK]" in vocabulary
    without = {key: value for key, value in vocabulary.items() if key != "[MASK]"}
    assert symbols_sha256(vocabulary) == symbols_sha256(without)
    assert symbols_sha256(vocabulary) != symbols_sha256(without | {"a": without["b"], "b": without["a"]})


def test_the_file_names_its_tokenizer_though_the_model_is_gone(file):
    for model in (file.made_by.model, "nowhere"):
        tokenizer = find_sample_tokenizer(replace(file.made_by, model=model), list(file))
        assert (tokenizer.name, tokenizer.sha256) == ("text8", TEXT8)


def test_a_model_folder_with_another_tokenizer_is_not_used(file, tmp_path):
    small_model(tmp_path / "model", "mdlm", tokenizer="bytes")
    assert find_sample_tokenizer(replace(file.made_by, model=str(tmp_path / "model")), list(file)).sha256 == TEXT8


def test_without_a_recorded_sha256_the_models_tokenizer_is_used(file, unrecorded):
    assert find_sample_tokenizer(unrecorded, list(file)).sha256 == TEXT8
    gone = replace(unrecorded, model="nowhere")
    assert find_sample_tokenizer(gone, list(file)).sha256 == TEXT8  # a built-in name is enough
    assert find_sample_tokenizer(replace(gone, tokenizer="tokenizer.json"), list(file)) is None
    assert find_sample_tokenizer(replace(gone, tokenizer="bytes"), list(file)) is None  # to it the ids are another text
    assert find_sample_tokenizer(replace(gone, tokenizer="?"), list(file), "text8").sha256 == TEXT8


def test_a_given_tokenizer_must_agree_with_the_samples(file, unrecorded):
    with pytest.raises(UserError, match="--tokenizer bytes did not write these samples: row 0 is another text to it"):
        find_sample_tokenizer(unrecorded, list(file), "bytes")
    with pytest.raises(UserError, match=f"their file names text8, with other symbols .sha256 {TEXT8[:12]}"):
        find_sample_tokenizer(file.made_by, list(file), "bytes")
    assert find_sample_tokenizer(file.made_by, list(file), "text8").sha256 == TEXT8
