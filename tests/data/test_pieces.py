"""Laws of pieces: nothing is lost, and where they end depends on the document alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import prose

from adlm.data import pieces
from adlm.data.pieces import Piece, documents_of, in_pieces
from adlm.tokens import load_tokenizer

TEXTS = st.lists(st.sampled_from(["a", "bc", " ", "\n", "\n\n", "é", ".", "\r\n"]), max_size=80).map("".join)


@pytest.fixture(autouse=True, scope="module")
def _small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 6)
        yield


def joined(found: list[Piece]) -> list[str]:
    documents, parts = [], []
    for text, ends in found:
        parts.append(text)
        if ends:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last document ends"
    return documents


@given(TEXTS)
def test_pieces_of_a_document_join_to_it(text):
    found = list(in_pieces(text))
    assert joined(found) == [text]
    assert all(len(piece.text) <= 24 for piece in found)


@given(TEXTS, st.integers(1, 20), st.sampled_from(["file", "line", "blank"]))
def test_pieces_do_not_depend_on_how_the_text_was_read(text, size, boundary):
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(documents_of(blocks, boundary)) == list(documents_of([text], boundary))


@given(TEXTS)
def test_lines_and_blank_lines_part_documents(text):
    lines = joined(list(documents_of([text], "line")))
    assert lines == text.removesuffix("\n").split("\n") if text else lines == []
    paragraphs = joined(list(documents_of([text], "blank")))
    assert all(paragraph.strip() for paragraph in paragraphs)
    assert "".join("".join(paragraphs).split()) == "".join(text.split())


@given(TEXTS, st.sampled_from(["file", "line", "blank"]))
def test_whole_documents_are_the_joined_pieces(text, boundary):
    whole = list(documents_of([text], boundary, whole=True))
    assert all(piece.ends for piece in whole)
    assert [piece.text for piece in whole] == joined(list(documents_of([text], boundary)))


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased"])
def test_a_real_tokenizer_gives_the_pieces_of_a_long_text_the_ids_of_the_text(name, data_folder, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 500)
    tokenizer = load_tokenizer(str(data_folder / "tokenizers" / name))
    text = (data_folder / "enwiki2014" / "valid.txt").read_text(encoding="utf-8")[:200_000]
    cut = [piece.text for piece in in_pieces(text)]
    assert len(cut) > 200
    assert [index for row in tokenizer.encode_batch(cut) for index in row] == tokenizer.encode(text)


def test_a_byte_level_tokenizer_gives_the_pieces_the_ids_of_the_text(bpe, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 100)
    tokenizer, text = load_tokenizer(bpe), prose(3000)
    cut = [piece.text for piece in in_pieces(text)]
    assert len(cut) > 50
    assert [index for row in tokenizer.encode_batch(cut) for index in row] == tokenizer.encode(text)
