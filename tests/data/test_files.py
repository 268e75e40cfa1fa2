"""Laws of reading files: every usual form gives the same documents, and what is no text is told in one sentence."""

import bz2
import csv
import gzip
import json
import lzma
import zipfile

import pytest

from adlm.data.files import TextFile, files_at
from adlm.errors import UserError

DOCUMENTS = ["The first document,\nin two lines.", 'A "second", naïve one: ☃', "and a third"]


def texts(path, **knobs) -> list[str]:
    documents, parts = [], []
    for text, ends in TextFile(path, path.name, **knobs).pieces():
        parts.append(text)
        if ends:
            documents.append("".join(parts))
            parts = []
    return documents


def write_plain(path):
    path.write_text("\n\n".join(DOCUMENTS) + "\n", encoding="utf-8")


def write_jsonl(path):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")


def write_json(path):
    path.write_text(json.dumps([{"text": text} for text in DOCUMENTS], indent=1), encoding="utf-8")


def write_table(path):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
            [["id", "text"], *([i, text] for i, text in enumerate(DOCUMENTS))]
        )


def write_parquet(path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra data)")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"text": DOCUMENTS, "id": [1, 2, 3]}), path)


FORMS = [
    ("a.txt", write_plain, {"boundary": "blank"}),
    ("a.jsonl", write_jsonl, {}),
    ("a.json", write_json, {}),
    ("a.csv", write_table, {}),
    ("a.tsv", write_table, {}),
    ("a.parquet", write_parquet, {}),
]


@pytest.mark.parametrize(("name", "write", "knobs"), FORMS, ids=[form[0] for form in FORMS])
def test_every_form_gives_the_same_documents(name, write, knobs, tmp_path):
    write(tmp_path / name)
    found = texts(tmp_path / name, **knobs)
    assert found == DOCUMENTS


def zstd(data: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra data)")
    return arrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress), ("zst", zstd)]
)
def test_a_compressed_file_is_the_file(suffix, compress, tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    packed = tmp_path / f"a.jsonl.{suffix}"
    packed.write_bytes(compress((tmp_path / "a.jsonl").read_bytes()))
    assert texts(packed) == DOCUMENTS


def test_a_zip_of_one_file_is_the_file_and_one_of_two_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "w") as archive:
        archive.writestr("a.txt", "inside")
    assert texts(tmp_path / "a.txt.zip") == ["inside"]
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "a") as archive:
        archive.writestr("b.txt", "too")
    with pytest.raises(UserError, match=r"holds 2 files"):
        texts(tmp_path / "a.txt.zip")


def test_progress_is_told_in_bytes_of_the_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"word " * 500_000))
    seen = []
    assert sum(len(piece.text) for piece in TextFile(path, "a").pieces(seen.append)) == 2_500_000
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("file", ["one\r\n\r\ntwo\r\nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("blank", ["one", "two\r\nthree"]),
    ],
)
def test_documents_end_with_the_file_the_line_or_the_blank_line(boundary, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\nthree\n")  # with a byte order mark
    assert texts(tmp_path / "a.txt", boundary=boundary) == expected


def test_several_fields_are_joined_and_columns_go_by_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "T", "body": "B"}\n')
    assert texts(tmp_path / "a.jsonl", field="title,body") == ["T B"]
    (tmp_path / "a.csv").write_text('"3","Title","Said ""so"""\n')
    assert texts(tmp_path / "a.csv", field="2,3") == ['Title Said "so"']


BROKEN = [
    ("a.txt", b"good \xff bad", {}, "a.txt is not UTF-8 text: byte 5 is 0xff"),
    ("a.txt", "wide".encode("utf-16"), {}, "it looks like UTF-16"),
    ("a.txt", b"nul \0 byte", {}, "a.txt holds NUL bytes, the first at byte 4,"),
    ("a.jsonl", b'{"text": "nul \\u0000"}\n', {}, "line 1 of a.jsonl holds NUL"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', {}, "line 2 of a.jsonl has no field 'text'; it has body"),
    ("a.jsonl", b'{"text": 5}\n', {}, "field 'text' in line 1 of a.jsonl is int"),
    ("a.jsonl", b'{"text": \n', {}, "line 1 of a.jsonl is not JSON"),
    ("a.jsonl", b'"text"\n', {}, "line 1 of a.jsonl is no record"),
    ("a.json", b'[{"text": "a"}, 3]', {}, "entry 1 of a.json is no record"),
    ("a.csv", b"title,body\n1,2\n", {}, "a.csv has no column 'text'; its first row is 'title, body'"),
    ("a.csv", b"title,text\nonly\n", {}, "line 2 of a.csv has 1 columns, and column 2 is wanted"),
    ("a.txt.gz", b"no gzip at all", {}, "a.txt.gz cannot be read"),
    ("a.txt.xz", b"no xz at all", {}, "a.txt.xz cannot be read"),
    ("a.txt.zip", b"no zip at all", {}, "a.txt.zip cannot be read"),
    ("a.parquet", b"no parquet at all", {}, "a.parquet cannot be read"),
]


@pytest.mark.parametrize(("name", "data", "knobs", "sentence"), BROKEN, ids=[f"{row[0]}-{row[3]}" for row in BROKEN])
def test_what_is_no_text_is_told_in_one_sentence(name, data, knobs, sentence, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        texts(tmp_path / name, **knobs)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_archive_is_told(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text " * 10_000)[:-20])
    with pytest.raises(UserError, match=r"a\.txt\.xz cannot be read"):
        texts(tmp_path / "a.txt.xz")


def test_damaged_text_can_be_replaced_instead(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad \0 end")
    assert texts(tmp_path / "a.txt", damaged="replace") == ["good \ufffd bad \ufffd end"]


def test_a_character_cut_by_a_block_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.reading.BLOCK", 3)
    (tmp_path / "a.txt").write_text("☃☃☃ naïve ☃", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["☃☃☃ naïve ☃"]
    (tmp_path / "a.txt").write_bytes("☃☃".encode() + b"\xff")
    with pytest.raises(UserError, match=r"byte 6 is 0xff"):
        texts(tmp_path / "a.txt")


def test_a_path_is_a_file_a_folder_or_a_glob(tmp_path):
    for name in ("b/two.txt", "a/one.jsonl.gz", "a/picture.png", "c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = lambda place: [str(file.relative_to(tmp_path)) for file in files_at(str(place))]  # noqa: E731
    assert names(tmp_path) == ["a/one.jsonl.gz", "b/two.txt", "c.csv"]
    assert names(tmp_path / "c.csv") == ["c.csv"]
    assert names(tmp_path / "**/*.txt") == ["b/two.txt"]
    for place, sentence in ((tmp_path / "no*", "matches no file"), (tmp_path / "empty", "matches no file")):
        with pytest.raises(UserError, match=sentence):
            files_at(str(place))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"a folder without a text file"):
        files_at(str(tmp_path / "empty"))
