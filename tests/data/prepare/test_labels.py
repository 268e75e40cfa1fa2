"""Labelled tokens: which they are, in rows of every packing and after an interruption; other text is as before."""

import hashlib
import io
import json
import keyword
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
import pytest

from adlm.data.prepare import prepare as preparing
from adlm.data.prepare.labels import label_tokens, python_names
from adlm.data.prepare.prepare import prepare
from adlm.data.rows.loader import START, Loader
from adlm.data.sources import text_files
from adlm.errors import UserError
from adlm.tokens import load_tokenizer

PROGRAM = '''import os  # of names
@cache
def f(x: int = 0x1F, *, y_1=1e5j) -> str:
    """A docstring, `os`."""
    return f"{x}" + rb'a\\'b' if x.real else os.sep * 1_000
'''
NAMES = "import os cache def f x int y_1 str return if x real else os sep"


def test_names_are_keywords_and_identifiers_and_not_strings_numbers_and_comments():
    assert " ".join(PROGRAM[slice(*span)] for span in python_names(PROGRAM)) == NAMES


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("'''a ' b''' c", ["c"]),
        ("x='it\\'s' ;y", ["x", "y"]),
        ("rb'a' br 'a'", ["br"]),
        ("'cut off\nname", ["name"]),
        ('"""never closed\nname', []),
        ("a.b1[2:c]", ["a", "b1", "c"]),
        ("1if x else.5", ["if", "x", "else"]),
        ("naïve_π = 0b1", ["naïve_π"]),
        ("", []),
    ],
)
def test_names_at_the_edges_of_the_lexer(text, names):
    assert [text[slice(*span)] for span in python_names(text)] == names


def test_names_are_those_of_the_tokenizer_of_python():
    """Of files of the standard library without f-strings, which later versions of Python take apart."""
    num_names = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        text = path.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        if any(token.type == tokenize.STRING and "f" in token.string[:2].lower() for token in tokens):
            continue
        expected = [token.string for token in tokens if token.type == tokenize.NAME]
        assert [text[slice(*span)] for span in python_names(text)] == expected, path.name
        num_names += len(expected)
    assert num_names > 5_000


def test_a_token_is_labelled_if_it_has_a_character_of_a_span():
    offsets = [(0, 1), (1, 3), (3, 4), (4, 4), (4, 6)]
    assert label_tokens(iter([(2, 4)]), offsets, 6).tolist() == [False, True, True, False, False]
    assert label_tokens(iter([]), offsets, 6).tolist() == [False] * 5
    assert label_tokens(iter([(0, 6)]), [], 6).tolist() == []


def test_labels_of_a_small_program_token_by_token(bpe):
    tokenizer = load_tokenizer(bpe)
    text = "def naïve(a):\n    return 'a' + a  # a\n"
    [(ids, offsets)] = tokenizer.encode_with_offsets([text])
    assert [ids] == tokenizer.encode_batch([text])
    labels = label_tokens(python_names(text), offsets, len(text))
    spans = list(python_names(text))
    for (start, stop), labelled in zip(offsets, labels, strict=True):
        assert labelled == any(start < end and begin < stop for begin, end in spans), text[start:stop]
    labelled = "".join(text[slice(*span)] for span, each in zip(offsets, labels, strict=True) if each)
    assert labelled.replace(" ", "") == "defnaïïveareturna"  # the two bytes of ï are two tokens


@pytest.fixture
def words(tmp_path, bpe):
    """Files of programs, one of them longer than a chunk, with a string that a chunk boundary cuts."""
    (tmp_path / "texts").mkdir()
    for name in "ab":
        programs = [{"text": PROGRAM * (1 + number % 3), "source": str(number)} for number in range(40)]
        (tmp_path / f"texts/{name}.jsonl").write_text("".join(json.dumps(program) + "\n" for program in programs))
    return [f"data.path={tmp_path / 'texts'}", "data.held_out=0.1", f"tokenizer={bpe}", "length=16"]


def sums(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents(prepared, split):
    """ids and labels of each document, from the files."""
    tokens = prepared.tokens(split)
    ids = np.zeros(len(tokens), np.int64)
    tokens.copy_to(ids, 0, len(ids))
    spans = [tokens.document(number) for number in range(tokens.extent.documents)]
    return [(ids[start:stop].tolist(), tokens.is_labelled[start:stop].tolist()) for start, stop in spans]


def test_a_prepared_folder_labels_every_document(words, resolve_config, tmp_path):
    prepared = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "out").prepared
    assert prepared.labels == "python"
    for split in ("train", "valid"):
        for ids, labels in documents(prepared, split):
            text = prepared.tokenizer.decode(ids[:-1])
            [(same, offsets)] = prepared.tokenizer.encode_with_offsets([text])
            assert ids == [*same, prepared.tokenizer.vocabulary.eos_id]
            assert labels == [*label_tokens(python_names(text), offsets, len(text)).tolist(), False]


def test_text_without_labels_is_as_before_and_labels_change_no_id(words, resolve_config, tmp_path):
    plain = prepare(resolve_config(*words), tmp_path / "plain").prepared
    labelled = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "labelled").prepared
    before, after = sums(tmp_path / "plain"), sums(tmp_path / "labelled")
    added = {f"{split}/labels.bin" for split in ("train", "valid")}
    assert set(after) - set(before) == added
    assert all(before[name] == after[name] for name in before if name != "manifest.json")
    assert "labels" not in plain.manifest["recipe"]
    assert plain.labels == "none"
    assert plain.rows("train").labels([0]) is None
    assert {**labelled.manifest["recipe"], "labels": None} == {**plain.manifest["recipe"], "labels": None}


def test_a_document_is_labelled_as_a_whole_however_long_it_is(words, resolve_config, tmp_path, monkeypatch):
    whole = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "whole").prepared
    monkeypatch.setattr(text_files, "CHUNK", 32)
    chunks = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "chunks").prepared
    assert documents(whole, "train") == documents(chunks, "train")


@pytest.mark.parametrize("packing", ["packed", "padded", "cropped", "packed-published"])
def test_rows_of_every_packing_have_the_labels_of_their_ids(packing, words, resolve_config, tmp_path):
    """A token of these programs is labelled alike everywhere, but for names that also occur in strings."""
    prepared = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "out").prepared
    rows = prepared.rows("train", packing=packing, overlap=True)
    tokens, (num_bos, num_eos) = prepared.tokens("train"), map(len, rows.vocabulary.row_boundaries)
    draws, kept = np.linspace(0, 0.99, len(rows)), np.linspace(1, 0.1, len(rows))
    for options in ({}, {"draws": draws}, {"draws": draws, "kept": kept}):
        x, pad = rows.read(range(len(rows)), **options)
        labels = rows.labels(range(len(rows)), **options)
        pad = np.zeros_like(x, bool) if pad is None else pad
        for number, (row, row_pad, row_labels) in enumerate(zip(x, pad, labels, strict=True)):
            start, _ = rows.layout.span(number, options.get("draws", np.zeros(len(rows)))[number])
            used = int((~row_pad).sum()) - num_bos - num_eos
            expected = np.zeros(rows.length, bool)
            expected[num_bos : num_bos + used] = tokens.is_labelled[start : start + used]
            assert row_labels.tolist() == expected.tolist()
            for index in row[row_labels].tolist():
                piece = prepared.tokenizer.piece(index).decode(errors="replace").strip(" @.([{")
                assert piece.isidentifier() or keyword.iskeyword(piece) or piece == "1", piece  # y_1


def test_batches_carry_labels_whatever_the_ranks_and_after_resuming(words, resolve_config, tmp_path):
    prepared = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "out").prepared
    rows = prepared.rows("train", overlap=True)

    def taken(num, start=START, **options):
        batches = Loader(rows, 12, seed=3, **{"reads_labels": True, **options}).batches(start)
        return [next(batches) for _ in range(num)]

    num = 2 * len(rows) // 12 + 2
    alone, halves = taken(num), [taken(num, rank=rank, num_ranks=2) for rank in range(2)]
    by_ids = {tuple(x.tolist()): set() for batch in alone for x in batch.x}
    for batch, *parts in zip(alone, *halves, strict=True):
        assert batch.labels.tolist() == [row for part in parts for row in part.labels.tolist()]
        for x, labels in zip(batch.x, batch.labels, strict=True):
            by_ids[tuple(x.tolist())].add(tuple(labels.tolist()))
    assert all(len(each) == 1 for each in by_ids.values()), "the same rows have the same labels in every epoch"
    [following] = taken(1, alone[2].after)
    assert following.labels.equal(alone[3].labels)
    assert taken(1, reads_labels=False)[0].labels is None


def test_an_interrupted_run_resumes_to_the_same_bytes(words, resolve_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    config = resolve_config(*words, "data.labels=python")
    prepare(config, tmp_path / "unbroken")
    for num_tokens in (1000, 4000):

        def stop(progress, num_tokens=num_tokens):
            if progress.tokens > num_tokens:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "broken", stop)
    assert prepare(config, tmp_path / "broken").how == "resumed"
    assert sums(tmp_path / "broken") == sums(tmp_path / "unbroken")


def test_other_labels_are_prepared_anew(words, resolve_config, tmp_path):
    prepare(resolve_config(*words), tmp_path / "out")
    outcome = prepare(resolve_config(*words, "data.labels=python"), tmp_path / "out")
    assert (outcome.how, outcome.prepared.labels) == ("prepared anew", "python")
    assert prepare(resolve_config(*words, "data.labels=python"), tmp_path / "out").how == "reused"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.path=x", "data.format=pairs"], "data.labels python is for running text; data.format pairs needs"),
        (["data.name=text8"], "data.labels python is for your own text; give data.path, or data.labels=none"),
        (["data.path=x", "data.streaming=true"], "data.labels python is for prepared text; use data.streaming=false"),
    ],
)
def test_text_that_cannot_be_labelled_is_refused(words, message, resolve_config):
    with pytest.raises(UserError, match=message):
        resolve_config(*words, "data.labels=python")
