"""Samples files: appended in batches, resumed after any truncation, with their provenance."""

import errno
import json
import random
from dataclasses import replace

import pytest

from adlm.errors import UserError
from adlm.samples_file import Provenance, Sample, open_samples, read_samples

MADE_BY = Provenance(
    adlm="0.1.0",
    model="runs/own",
    weights="00ff",
    method="adlm",
    tokenizer="bytes",
    length=4,
    canvases=["[MASK*4]", "é\u2028[MASK]"],
    num=5,
    seed=3,
    sampling={"sampler": "ancestral", "steps": 8},
    batch=2,
    device="cpu",
    dtype="float32",
    tokenizer_sha256="abcd",
    about={"parameters": 12, "tokens_trained": 34},
)
SAMPLES = [Sample(row, row // 5, 3, f"line\n{row} \u2028 é \x00", [row, 255]) for row in range(10)]


def write(path, made_by=MADE_BY, num=10, batch=2):
    """Like `adlm sample`: resumes at the incomplete batch and appends its missing rows."""
    with open_samples(path, made_by) as file:
        for start in range(file.num_rows - file.num_rows % batch, num, batch):
            file.append([sample for sample in SAMPLES[start : start + batch] if sample.row >= file.num_rows])


def test_samples_and_provenance_can_be_read_back(tmp_path):
    write(tmp_path / "deep" / "samples.jsonl")
    samples = read_samples(tmp_path / "deep" / "samples.jsonl")
    assert samples.made_by == MADE_BY
    assert list(samples) == SAMPLES == list(samples)
    assert samples.made_by.num_rows == 10


def test_a_file_truncated_anywhere_is_resumed_to_the_same_bytes(tmp_path):
    complete, truncated = tmp_path / "complete.jsonl", tmp_path / "truncated.jsonl"
    write(complete)
    data = complete.read_bytes()
    for end in [*range(0, 500, 7), *random.Random(0).sample(range(len(data) + 1), 60), len(data) - 1, len(data)]:
        truncated.write_bytes(data[:end])
        write(truncated)
        assert truncated.read_bytes() == data


def test_an_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert [sample.row for sample in read_samples(path)] == list(range(9))


def test_a_file_with_other_provenance_is_a_user_error_and_left_unchanged(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path)
    before = path.read_bytes()
    other = replace(MADE_BY, seed=4, sampling={"sampler": "ancestral", "steps": 9})
    with pytest.raises(UserError, match=r"with other settings: seed 3 -> 4, sampling.steps 8 -> 9; give another --out"):
        write(path, other)
    assert path.read_bytes() == before


def remove_provenance(path, removed):
    """Remove an entry from the first line of a file."""
    first, _, rows = path.read_bytes().partition(b"\n")
    made_by = {name: value for name, value in json.loads(first)["made_by"].items() if name != removed}
    path.write_bytes(json.dumps({"made_by": made_by}, ensure_ascii=False).encode() + b"\n" + rows)


def test_a_file_can_be_resumed_with_other_facts_about_the_model_but_not_with_another_tokenizer(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, num=5)
    write(path, replace(MADE_BY, about={"parameters": 12, "tokens_trained": 40}))
    assert read_samples(str(path)).made_by == MADE_BY
    with pytest.raises(UserError, match="with other settings: tokenizer_sha256 abcd -> ef01"):
        write(path, replace(MADE_BY, tokenizer_sha256="ef01"))


@pytest.mark.parametrize("name", ["weights", "tokenizer_sha256", "about"])
def test_a_first_line_with_missing_entries_is_a_user_error_and_left_unchanged(tmp_path, name):
    path = tmp_path / "samples.jsonl"
    write(path)
    remove_provenance(path, name)
    before = path.read_bytes()
    for use in (read_samples, write):
        with pytest.raises(UserError, match="not a samples file"):
            use(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"my diary", b"my diary\n", b"{}\n", b'{"made_by": 1}\n', b"\x00" * 9, b"[1]\n"])
def test_a_file_that_is_not_a_samples_file_is_a_user_error_and_left_unchanged(tmp_path, content):
    path = tmp_path / "diary.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a samples file"):
        write(path)
    assert path.read_bytes() == content
    with pytest.raises(UserError, match="not a samples file"):
        read_samples(path)


def test_a_damaged_file_is_a_user_error(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged, message in (
        ([*lines[:3], b"??\n", *lines[4:]], "line 4 is not JSON"),
        ([*lines[:3], *lines[4:]], "line 4 is not row 2"),
        ([*lines, lines[-1].replace(b'"row": 9', b'"row": 10')], "more than the 10 rows"),
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match=message):
            list(read_samples(path))
        with pytest.raises(UserError, match=message):
            write(path)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"num": 5', b'"num": "x"'),
        (b'"seed": 3, "sampling": {', b'"seed": null, "sampling": {'),
        (b'"canvases": [', b'"canvases": 5, "x": ['),
        (b'"tokenizer_sha256": "abcd"', b'"tokenizer_sha256": 7'),
        (b'"ids": [4, 255]', b'"ids": ["4", 255]'),
        (b'"ids": [4, 255]', b'"ids": [4.5]'),
        (b'"ids": [4, 255]', b'"ids": [-4, 255]'),
        (b'"ids": [4, 255]', b'"ids": [4, 99999999999]'),
        (b'"ids": [4, 255]', b'"ids": "ab"'),
        (b'"text": "line\\n4', b'"text": "\\ud800'),
        (b'"text": "line\\n4', b'"text": 4, "t": "'),
    ],
)
def test_entries_of_wrong_types_are_a_user_error(tmp_path, was, now):
    path = tmp_path / "samples.jsonl"
    write(path)
    data = path.read_bytes()
    assert was in data
    path.write_bytes(data.replace(was, now, 1))
    with pytest.raises(UserError, match=r"is damaged|is not a samples file"):
        list(read_samples(path))


def test_a_file_without_samples_is_deleted(tmp_path):
    path = tmp_path / "samples.jsonl"
    with open_samples(path, MADE_BY):
        assert path.exists()
    assert not path.exists()


def test_two_processes_cannot_write_the_same_file(tmp_path):
    with open_samples(tmp_path / "samples.jsonl", MADE_BY), pytest.raises(UserError, match="another process"):
        write(tmp_path / "samples.jsonl")


def test_a_full_disk_is_a_user_error_and_leaves_complete_lines(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(path, num=4)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; 4 samples are complete"):
        write(path)
    monkeypatch.undo()
    assert [sample.row for sample in read_samples(path)] == [0, 1, 2, 3]


def test_a_path_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "samples.jsonl"):
        with pytest.raises(UserError, match=r"is not a regular file|cannot be written"):
            write(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl")
