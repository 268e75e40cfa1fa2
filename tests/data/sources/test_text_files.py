"""Reading files: every format gives the same documents, and invalid text is a user error."""

import bz2
import csv
import gzip
import json
import lzma
import zipfile

import pytest

from adlm.data.sources.text_files import TextFile, files_at
from adlm.errors import UserError

DOCUMENTS = ["The first document,\nin two lines.", 'A "second", naïve one: ☃', "and a third"]


def texts(path, **options) -> list[str]:
    documents, parts = [], []
    for text, ends in TextFile(path, path.name, **options).chunks():
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


@pytest.mark.parametrize(("name", "write", "options"), FORMS, ids=[form[0] for form in FORMS])
def test_every_format_gives_the_same_documents(name, write, options, tmp_path):
    write(tmp_path / name)
    found = texts(tmp_path / name, **options)
    assert found == DOCUMENTS


def zstd(data: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra data)")
    return arrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress), ("zst", zstd)]
)
def test_a_compressed_file_gives_the_same_documents(suffix, compress, tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    packed = tmp_path / f"a.jsonl.{suffix}"
    packed.write_bytes(compress((tmp_path / "a.jsonl").read_bytes()))
    assert texts(packed) == DOCUMENTS


def test_a_zip_of_one_file_is_read_and_one_of_two_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "w") as archive:
        archive.writestr("a.txt", "inside")
    assert texts(tmp_path / "a.txt.zip") == ["inside"]
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "a") as archive:
        archive.writestr("b.txt", "too")
    with pytest.raises(UserError, match=r"holds 2 files"):
        texts(tmp_path / "a.txt.zip")


def zipped(path, name, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)


def test_a_zip_has_the_format_of_the_file_inside(tmp_path):
    zipped(tmp_path / "a.zip", "a.jsonl", '{"text": "inside"}\n')
    assert texts(tmp_path / "a.zip") == ["inside"]
    zipped(tmp_path / "a.txt.zip", "b.csv", "text\nrow\n")
    assert texts(tmp_path / "a.txt.zip") == ["row"]
    zipped(tmp_path / "a.jsonl.zip", "noname", '{"text": "by the outer name"}\n')
    assert texts(tmp_path / "a.jsonl.zip") == ["by the outer name"]
    for name, sentence in (("a.txt.gz", "itself compressed"), ("a.parquet", "compressed once more")):
        zipped(tmp_path / "a.zip", name, "anything")
        with pytest.raises(UserError, match=sentence):
            texts(tmp_path / "a.zip")


def test_an_encrypted_zip_is_a_user_error(tmp_path):
    zipped(tmp_path / "a.zip", "a.txt", "secret")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[6] |= 1  # the flag in the file's own header and in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.zip cannot be read: .*encrypted.*unpack it"):
        texts(tmp_path / "a.zip")


def test_a_parquet_file_with_two_columns_of_one_name_is_a_user_error(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra data)")
    import pyarrow.parquet

    table = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has 2 fields 'text'"):
        texts(tmp_path / "a.parquet")


def test_quotes_in_a_tsv_are_parsed_only_if_the_whole_file_uses_quoting(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"Well\n2\tshe said "so"\n3\tends"\n')
    assert texts(path) == ['"Well', 'she said "so"', 'ends"']
    path.write_text('id\ttext\n1\t"in two\nlines, ""so"""\n2\tplain\n')
    assert texts(path) == ['in two\nlines, "so"', "plain"]


def test_one_record_over_several_lines_and_a_list_after_a_blank_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "alone", "more": [1, 2]}, indent=2))
    assert texts(path) == ["alone"]
    path.write_text("\n \n" + json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    assert texts(path) == ["a", "b"]
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert texts(path) == ["a", "b"]


def test_a_json_list_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.decoding.LONGEST_LINE", 1000)
    (tmp_path / "a.json").write_text("[\n" + ",\n".join('{"text": "words"}' for _ in range(100)) + "]")
    with pytest.raises(UserError, match=r"a\.json is one JSON value of more than .*\.jsonl"):
        texts(tmp_path / "a.json")


def chunks_of(path, **options):
    return list(TextFile(path, path.name, **options).chunks())


def test_a_line_of_many_chunks_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.text_files.CHUNK", 10)
    path, blanks = tmp_path / "a.txt", " " * 500
    path.write_bytes(f"one{blanks}\r\n{blanks}\r\n{blanks}two\r{blanks}\r\nthree\n".encode())
    assert texts(path, boundary="line") == [f"one{blanks}", f"{blanks}two\r{blanks}", "three"]
    found = chunks_of(path, boundary="line")
    assert len(found) > 20
    assert sum(piece.ends for piece in found) == 3, "no ids are left without a document"
    path.write_bytes(f"one\n{blanks}".encode())
    assert chunks_of(path, boundary="line") == [("one", True)]
    path.write_bytes(f"one\n\n{blanks}".encode())
    assert chunks_of(path, boundary="blank") == [("one", True)]


def test_a_carriage_return_inside_a_line_stays(tmp_path, monkeypatch):
    """A piece that ends in a return is no line that does."""
    monkeypatch.setattr("adlm.data.sources.text_files.CHUNK", 10)
    (tmp_path / "a.txt").write_bytes(b"x" * 39 + b"\r" + b"y" * 100 + b"\r\n")
    assert texts(tmp_path / "a.txt", boundary="line") == ["x" * 39 + "\r" + "y" * 100]


def test_progress_is_reported_in_bytes_of_the_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"word " * 500_000))
    seen = []
    assert sum(len(piece.text) for piece in TextFile(path, "a").chunks(seen.append)) == 2_500_000
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("file", ["one\n\ntwo\nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("blank", ["one", "two\nthree"]),
    ],
)
def test_documents_end_with_the_file_the_line_or_the_blank_line(boundary, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\nthree\n")  # with a byte order mark
    assert texts(tmp_path / "a.txt", boundary=boundary) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_windows_line_breaks_are_read_as_lf_wherever_a_block_ends(size, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.decoding.BLOCK", size)
    (tmp_path / "windows.txt").write_bytes(b"\r\none\r\n\r\ntwo\r\r\n\rthree\r")
    assert texts(tmp_path / "windows.txt") == ["\none\n\ntwo\r\n\rthree\r"]


def test_several_fields_are_joined_and_columns_are_selected_by_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "T", "body": "B"}\n')
    assert texts(tmp_path / "a.jsonl", field="title,body") == ["T B"]
    (tmp_path / "a.csv").write_text('"3","Title","Said ""so"""\n')
    assert texts(tmp_path / "a.csv", field="2,3") == ['Title Said "so"']


BROKEN = [
    ("a.txt", b"good \xff bad", {}, "a.txt is not UTF-8 text: byte 5 is 0xff"),
    ("a.txt", "wide".encode("utf-16"), {}, "it looks like UTF-16; convert it: iconv -f UTF-16 -t UTF-8 /"),
    ("a.txt", "Le café.".encode("latin-1"), {}, "it looks like Latin-1; convert it: iconv -f ISO-8859-1 -t UTF-8 /"),
    ("a.txt", "Le café".encode("latin-1"), {}, "it looks like Latin-1"),
    (
        "a.txt",
        "Er ging in ein “Café”.".encode("cp1252"),
        {},
        "it looks like Windows-1252; convert it: iconv -f WINDOWS-1252",
    ),
    ("a.txt", "Привет, мир".encode("cp1251"), {}, "find out its encoding (`file -i`), and convert it to UTF-8 with"),
    ("a.txt", "é ü ß".encode() + b"\xc3", {}, "byte 8 is 0xc3 (data.damaged=replace reads it anyway)"),
    ("a.txt", b"\x89PNG\r\n\x1a\n\0\0", {}, "it looks like a binary file, not text (data.damaged=replace"),
    (
        "a.txt",
        b"nul \0 byte",
        {},
        "a.txt holds NUL bytes, the first at byte 4, so it looks like a binary file, not text",
    ),
    ("a.pdf", b"%PDF-1.7\n1 0 obj", {}, "a.pdf looks like a PDF, not text; convert it with pdftotext"),
    ("a.txt", b"%PDF-1.7\n1 0 obj", {"damaged": "replace"}, "a.txt looks like a PDF, not text"),
    ("a.docx", b"PK\x03\x04words", {}, "a.docx looks like a zip archive or an office document (.docx"),
    ("a.jsonl", b'{"text": "nul \\u0000"}\n', {}, "line 1 of a.jsonl holds NUL"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', {}, "line 2 of a.jsonl has no field 'text'; it has body"),
    ("a.jsonl", b'{"text": 5}\n', {}, "field 'text' in line 1 of a.jsonl is int"),
    ("a.jsonl", b'{"text": \n', {}, "line 1 of a.jsonl is not JSON"),
    ("a.jsonl", b'"text"\n', {}, "line 1 of a.jsonl is not a record"),
    ("a.json", b'[{"text": "a"}, 3]', {}, "entry 1 of a.json is not a record"),
    ("a.csv", b"title,body\n1,2\n", {}, "a.csv has no column 'text'; its first row is 'title, body'"),
    ("a.csv", b"title,text\nonly\n", {}, "line 2 of a.csv has 1 columns, and column 2 is wanted"),
    ("a.csv", b'id,text\n1,good\n2,"open\n3,more\n', {}, "line 3 of a.csv is not CSV: a quote is opened and never"),
    ("a.csv", b'id,text\n1,"so"he said\n', {}, "line 2 of a.csv is not CSV: ',' expected"),
    ("a.csv", b"one,two\n", {"field": "0"}, "a.csv has no column '0'; its first row is 'one, two'"),
    ("a.csv", b"one,two\n", {"field": "\u00b2"}, "a.csv has no column '\u00b2'"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "half \\ud83d"}\n', {}, "line 2 of a.jsonl holds half a character"),
    ("a.json", b'\n{\n"text": 3\n}\n', {}, "field 'text' in entry 0 of a.json is int"),
    ("a.txt.gz", gzip.compress(b"text " * 1000)[:30] + b"\xff" * 30, {}, "a.txt.gz cannot be read: Error"),
    ("a.txt.gz", b"no gzip at all", {}, "a.txt.gz cannot be read"),
    ("a.txt.xz", b"no xz at all", {}, "a.txt.xz cannot be read"),
    ("a.txt.zip", b"no zip at all", {}, "a.txt.zip cannot be read"),
    ("a.parquet", b"no parquet at all", {}, "a.parquet cannot be read"),
]


@pytest.mark.parametrize(("name", "data", "options", "sentence"), BROKEN, ids=[f"{row[0]}-{row[3]}" for row in BROKEN])
def test_invalid_text_is_a_user_error(name, data, options, sentence, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        texts(tmp_path / name, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_archive_is_a_user_error(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text " * 10_000)[:-20])
    with pytest.raises(UserError, match=r"a\.txt\.xz cannot be read"):
        texts(tmp_path / "a.txt.xz")


def test_damaged_text_can_be_replaced_instead(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad \0 end")
    assert texts(tmp_path / "a.txt", damaged="replace") == ["good \ufffd bad \ufffd end"]


def test_a_character_across_two_blocks_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.decoding.BLOCK", 3)
    (tmp_path / "a.txt").write_text("☃☃☃ naïve ☃", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["☃☃☃ naïve ☃"]
    (tmp_path / "a.txt").write_bytes("☃☃".encode() + b"\xff")
    with pytest.raises(UserError, match=r"byte 6 is 0xff"):
        texts(tmp_path / "a.txt")


def test_lone_surrogates_of_records_are_replaced_like_nul(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d and \\u0000"}\n')
    assert texts(tmp_path / "a.jsonl", damaged="replace") == ["half \ufffd and \ufffd"]


def test_hidden_files_of_a_folder_are_left_out(tmp_path):
    for name in ("a.txt", ".b.txt", ".cache/c.txt", "d/.e/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert files_at(str(tmp_path)) == [tmp_path / "a.txt"]
    (tmp_path / ".home").mkdir()
    (tmp_path / ".home/g.txt").write_text("x")
    assert files_at(str(tmp_path / ".home")) == [tmp_path / ".home/g.txt"], "a folder asked for by name is read"


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
