"""Chunks: nothing is lost, and their boundaries depend on the document alone."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from texts import prose

from adlm.data.sources import text_files
from adlm.data.sources.text_files import Chunk, join_chunks, split_into_chunks
from adlm.tokens import load_tokenizer

TEXTS = st.lists(
    st.sampled_from(["a", "bc", " ", "      ", "\n", "\n\n", "é", ".", "\r\n", "\t", "\u3000"]), max_size=80
).map("".join)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK", 6)
        yield


def joined(found: list[Chunk]) -> list[str]:
    documents, parts = [], []
    for text, ends in found:
        parts.append(text)
        if ends:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last document ends"
    return documents


@given(TEXTS)
def test_chunks_of_a_document_join_to_it(text):
    found = list(split_into_chunks(text))
    assert joined(found) == [text]
    assert all(len(piece.text) <= 24 for piece in found)


@given(TEXTS, st.integers(1, 20), st.sampled_from(["file", "line", "blank"]))
@example("a\n\n\nb", 3, "blank")
@example("a\r\n \t\r\nb\n", 2, "blank")
@example("abcdefghijkl" * 3 + " b\n" + " " * 30, 7, "blank")
@example("a" + " " * 40 + "b", 5, "blank")
@example("a" * 25 + " " + "b" * 25, 4, "file")
def test_chunks_do_not_depend_on_how_the_text_was_read(text, size, boundary):
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(join_chunks(blocks, boundary)) == list(join_chunks([text], boundary))


@given(TEXTS)
def test_lines_and_blank_lines_separate_documents(text):
    lines = joined(list(join_chunks([text], "line")))
    assert lines == text.removesuffix("\n").split("\n") if text else lines == []
    paragraphs = joined(list(join_chunks([text], "blank")))
    assert all(paragraph.strip() for paragraph in paragraphs)
    assert "".join("".join(paragraphs).split()) == "".join(text.split())


def test_the_last_paragraph_ends_without_a_line_break_like_the_others():
    for end in ("", "\n", "\r\n", "\n\n", "\n \t\n", "\n  "):
        assert joined(list(join_chunks([f"a\n\nb\nc{end}"], "blank"))) == ["a", "b\nc"]
    assert joined(list(join_chunks(["a\n\nb  "], "blank"))) == ["a", "b  "], "blanks in a line stay"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd efgh ijklm", ["abcd", " efgh ijklm"]),  # between words, though blanks begin later too
        ("abcd,  efg hijkl", ["abcd,", "  efg hijkl"]),  # where blanks begin, however many
        ("abcdefghi jklmnopqrstuvwxyz", ["abcdefghi", " jklmnopqrstuvwxyz"]),  # beyond the piece
        ("a" * 30, ["a" * 24, "a" * 6]),  # nowhere
        ("a" + " " * 29, ["a" + " " * 23, " " * 6]),
    ],
)
def test_a_chunk_ends_before_whitespace(text, expected):
    assert [piece.text for piece in split_into_chunks(text)] == expected


@given(TEXTS, st.sampled_from(["file", "line", "blank"]))
def test_whole_documents_are_the_joined_chunks(text, boundary):
    whole = list(join_chunks([text], boundary, whole=True))
    assert all(piece.ends for piece in whole)
    assert [piece.text for piece in whole] == joined(list(join_chunks([text], boundary)))


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased"])
def test_a_real_tokenizer_gives_the_chunks_of_a_long_text_the_ids_of_the_text(name, data_folder, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK", 500)
    tokenizer = load_tokenizer(str(data_folder / "tokenizers" / name))
    text = (data_folder / "enwiki2014" / "valid.txt").read_text(encoding="utf-8")[:200_000]
    cut = [piece.text for piece in split_into_chunks(text)]
    assert len(cut) > 200
    assert [index for row in tokenizer.encode_batch(cut) for index in row] == tokenizer.encode(text)


@pytest.mark.parametrize("blank", ["\n", "\n\n", "   ", "\t", " \n  "])
def test_words_separated_by_any_whitespace_keep_their_ids(bpe, monkeypatch, blank):
    monkeypatch.setattr(text_files, "CHUNK", 20)
    tokenizer, text = load_tokenizer(bpe), blank.join(f"({word})." for word in prose(400).split())
    cut = [piece.text for piece in split_into_chunks(text)]
    assert len(cut) > 50
    assert [index for row in tokenizer.encode_batch(cut) for index in row] == tokenizer.encode(text)


def test_splitting_a_long_document_takes_linear_time():
    """200 thousand chunks; copying the remaining text at every cut would be a hundred gigabytes."""
    document, started = "ab cd " * 200_000, time.process_time()
    assert sum(1 for _ in split_into_chunks(document)) > 200_000
    assert time.process_time() - started < 8


def test_a_byte_level_tokenizer_gives_the_chunks_the_ids_of_the_text(bpe, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK", 100)
    tokenizer, text = load_tokenizer(bpe), prose(3000)
    cut = [piece.text for piece in split_into_chunks(text)]
    assert len(cut) > 50
    assert [index for row in tokenizer.encode_batch(cut) for index in row] == tokenizer.encode(text)
