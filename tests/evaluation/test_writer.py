"""Laws of who wrote samples: the model's own tokenizer, and never one that merely reads the same."""

from dataclasses import replace

import pytest
from small_models import small_model
from texts import prose

from adlm.errors import UserError
from adlm.evaluation.writer import same, spells, symbols_of, writer_of
from adlm.interfaces.cli import main
from adlm.samples_file import Sample, read_samples
from adlm.tokens import load_tokenizer, train_bpe


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    small_model(folder / "model", "mdlm", tokenizer="text8")
    assert main(["sample", str(folder / "model"), "--num", "3", "--out", str(folder / "samples.jsonl")]) == 0
    return read_samples(folder / "samples.jsonl")


def test_a_larger_tokenizer_of_one_text_reads_what_a_smaller_wrote_and_is_another():
    texts = [prose(400, seed) for seed in range(4)]
    small, large = train_bpe(texts, 300), train_bpe(texts, 360)
    text = prose(20, 9)
    sample = Sample(0, 0, 0, text, small.encode(text))
    assert spells(large, sample)
    assert large.encode(text) != sample.ids
    assert not same(small, large)
    assert same(small, train_bpe(texts, 300))
    assert not same(small, None)


def test_the_mask_makes_no_difference_to_who_reads_whole_texts():
    vocabulary = load_tokenizer("bytes").engine.get_vocab()
    assert "[MASK]" in vocabulary
    assert symbols_of(vocabulary) == symbols_of({key: value for key, value in vocabulary.items() if key != "[MASK]"})


def test_the_models_own_tokenizer_wrote_them(file):
    assert same(writer_of(file.made_by, list(file)), load_tokenizer("text8"))


def test_where_the_model_is_gone_a_built_in_name_is_enough_and_another_is_not(file):
    gone = replace(file.made_by, model="nowhere")
    assert same(writer_of(gone, list(file)), load_tokenizer("text8"))
    assert writer_of(replace(gone, tokenizer="tokenizer.json"), list(file)) is None
    assert writer_of(replace(gone, tokenizer="bytes"), list(file)) is None  # to it the ids are another text
    assert same(writer_of(replace(gone, tokenizer="?"), list(file), "text8"), load_tokenizer("text8"))


def test_a_given_tokenizer_must_have_written_them(file):
    with pytest.raises(UserError, match="--tokenizer bytes did not write these samples: row 0 is another text to it"):
        writer_of(file.made_by, list(file), "bytes")
