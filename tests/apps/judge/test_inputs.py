"""Reference texts: which texts are taken, from which sources, and what is rejected."""

import json

import pytest
from small_runs import corpus

from adlm.apps.judge.inputs import JudgeSettings, read_reference
from adlm.data.prepare.prepared import open_prepared
from adlm.errors import UserError
from adlm.tokens import load_tokenizer


def reference(path, num, sha256="", max_tokens=0, **settings):
    return read_reference(JudgeSettings(reference=path, **settings), num, sha256, max_tokens)


def lines(path, num=50):
    path.write_text("".join(f"text {number}\n" for number in range(num)))
    return path


def test_texts_are_a_seeded_subset_in_their_original_order(tmp_path):
    path = lines(tmp_path / "texts.txt")
    first = reference(path, 10)
    assert first == reference(path, 10)
    assert first.texts != reference(path, 10, reference_seed=1).texts
    numbers = [int(text.split()[1]) for text in first.texts]
    assert numbers == sorted(set(numbers))
    assert (first.about["num"], first.about["of"], first.ids) == (10, 50, None)


def test_every_text_is_as_likely_as_any_other(tmp_path):
    path = lines(tmp_path / "texts.txt", 10)
    drawn = [text for seed in range(400) for text in reference(path, 3, reference_seed=seed).texts]
    counts = [drawn.count(f"text {number}") for number in range(10)]
    assert sum((count - 120) ** 2 / 120 for count in counts) < 27.9  # chi-square of 9 degrees, 0.1%


def test_all_texts_are_taken_where_there_are_fewer(tmp_path):
    found = reference(lines(tmp_path / "texts.txt", 4), 10)
    assert len(found.texts) == 4
    assert found.about["num"] == 4


def test_a_jsonl_has_a_field(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": f"a {number}\nb"}) + "\n" for number in range(3)))
    assert reference(path, 3, field="body").texts == ["a 0\nb", "a 1\nb", "a 2\nb"]
    with pytest.raises(UserError, match="has no field 'text'; it has body: give --field NAME"):
        reference(path, 3)


def test_a_prepared_split_gives_rows_as_long_as_the_samples(tmp_path):
    prepared = corpus(tmp_path)
    tokenizer = load_tokenizer("bytes")
    found = reference(prepared, 5, sha256=tokenizer.sha256, max_tokens=10)
    assert found.ids is not None
    assert {len(ids) for ids in found.ids} == {10}
    tokenizer = open_prepared(prepared).tokenizer
    assert [tokenizer.decode(ids) for ids in found.ids] == found.texts
    assert (found.about["split"], found.about["row_length"]) == ("valid", 10)
    assert reference(prepared, 5, split="train", sha256=tokenizer.sha256, max_tokens=10).about["split"] == "train"
    other = reference(prepared, 5, sha256=load_tokenizer("text8").sha256, max_tokens=10)
    assert other.ids is None
    assert not other.about["tokenizer_of_samples"]
    assert other.about["row_length"] == 16


def test_an_invalid_reference_is_rejected(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    cases = {
        tmp_path: "is a folder but no prepared one",
        tmp_path / "none.txt": "does not exist",
        tmp_path / "empty.txt": "holds no text",
    }
    for place, sentence in cases.items():
        with pytest.raises(UserError, match=sentence):
            reference(place, 3)
    with pytest.raises(UserError, match="has no splits"):
        reference(lines(tmp_path / "texts.txt"), 3, split="valid")
    with pytest.raises(UserError, match="has no split 'test'"):
        reference(corpus(tmp_path), 3, split="test")
