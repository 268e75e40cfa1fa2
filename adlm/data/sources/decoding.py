"""Decodes files to texts, with one-line errors: decompression, UTF-8, and records in JSON, CSV, TSV and parquet.

Independent of documents. The readers of `datasets` (5.2) are not used for local files: they let NUL bytes and byte
order marks through, hold a whole document in memory, name no line in an error, and are an optional package.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from adlm.errors import UserError

BLOCK = 2**20  # bytes read at once
LONGEST_LINE = 2**29  # characters; one line or one JSON list of records is held in memory
COMPRESSED = (".gz", ".xz", ".bz2", ".zst", ".zip")
JSON = (".jsonl", ".ndjson", ".json")
PLAIN, RECORDS = (".txt", ".md", ".text"), (*JSON, ".csv", ".tsv", ".parquet")
SURROGATE = re.compile("[\ud800-\udfff]")
REPLACE_HINT = "(data.damaged=replace reads it anyway)"
SIGNATURES = {
    b"%PDF-": "a PDF, not text; convert it with pdftotext",
    b"PK\x03\x04": "a zip archive or an office document (.docx, .odt), not text; unpack it, or save it as plain text",
    b"\xd0\xcf\x11\xe0": "an office document, not text; save it as plain text",
    b"{\\rtf": "RTF, not plain text; save it as plain text",
    b"\x1f\x8b": "a gzip file, not text; end its name in .gz",
}
"""How files begin that are not text, with what they are and the remedy."""


def suffix_of(path: Path) -> str:
    """.jsonl for both a.jsonl and a.jsonl.gz."""
    path = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return path.suffix.lower()


def form_of(path: Path) -> str:
    """The format suffix of a file; for a .zip, that of the file inside if it is a supported one."""
    if path.suffix.lower() == ".zip":
        with decoding_errors(path.name), zipfile.ZipFile(path) as archive:
            inside = Path(_only_member(archive, path).filename).suffix.lower()
        if inside in COMPRESSED:
            raise UserError(f"{path.name} holds a file that is itself compressed; unpack it")
        return inside if inside in (*PLAIN, *RECORDS) else suffix_of(path)
    return suffix_of(path)


def decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    """A stream of the decompressed bytes of a file, by its suffix."""
    match path.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".zst":
            pyarrow = arrow()
            return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"))
        case ".zip":
            archive = zipfile.ZipFile(raw)
            member = _only_member(archive, path)
            try:
                return archive.open(member)
            except RuntimeError as error:  # encrypted, or an unsupported compression method
                raise UserError(f"{path.name} cannot be read: {error}; unpack it") from None
        case _:
            return raw


def _only_member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise UserError(f"{path.name} holds {len(members)} files; unpack it, and give the folder")
    return members[0]


def text_blocks(stream: IO[bytes], path: Path, name: str, damaged: str) -> Iterator[str]:
    """The decoded text of a byte stream in blocks, with the line breaks of Windows (CRLF) as LF.

    Files that are no text are refused; NUL and invalid UTF-8 are refused or replaced, as `damaged` says. `path` is the
    file in the command that converts it.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict" if damaged == "refuse" else "replace")
    read, last, carriage_return = 0, b"", ""
    while True:
        block = stream.read(BLOCK)
        last = block or last
        if not read and (kind := next((kind for start, kind in SIGNATURES.items() if block.startswith(start)), "")):
            raise UserError(f"{name} looks like {kind}")
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = read + len(block) - len(error.object) + error.start
            raise UserError(
                f"{name} is not UTF-8 text: byte {at:,} is {error.object[error.start]:#04x}{_remedy(last, path)}"
            ) from None
        if "\0" in text and damaged == "refuse":
            at = read + block.index(b"\0")
            raise UserError(
                f"{name} holds NUL bytes, the first at byte {at:,}, so it looks like a binary file, not text "
                f"{REPLACE_HINT}"
            )
        text = carriage_return + text
        carriage_return = "\r" if block and text.endswith("\r") else ""  # a line feed may follow in the next block
        yield text.removesuffix(carriage_return).replace("\r\n", "\n").replace("\0", "\ufffd")
        if not block:
            return
        read += len(block)


def _remedy(data: bytes, path: Path) -> str:
    """What text that is not UTF-8 looks like, and how to convert it."""
    decoded = data.decode(errors="replace")
    num_damaged, num_high = decoded.count("\ufffd"), sum(byte > 0x7F for byte in data)
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding, code = "UTF-16", "UTF-16"
    elif re.search(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]", data):
        return f"; it looks like a binary file, not text {REPLACE_HINT}"
    elif sum(character > "\x7f" for character in decoded) > 2 * num_damaged:  # most other characters are valid UTF-8
        return f" {REPLACE_HINT}"
    elif 4 * num_high > len(data):  # not a language in Latin letters
        return f"; find out its encoding (`file -i`), and convert it to UTF-8 with iconv {REPLACE_HINT}"
    else:
        has_c1 = re.search(rb"[\x80-\x9f]", data) is not None
        encoding, code = ("Windows-1252", "WINDOWS-1252") if has_c1 else ("Latin-1", "ISO-8859-1")
    file = "FILE" if path.suffix.lower() in COMPRESSED else shlex.quote(str(path))
    return f"; it looks like {encoding}; convert it: iconv -f {code} -t UTF-8 {file} > utf8.txt"


def check_text(text: str, damaged: str, where: str) -> str:
    """The text with NUL and lone surrogates, which tokenizers reject, refused or replaced by U+FFFD."""
    nul = "\0" in text
    if not nul and (text.isascii() or not SURROGATE.search(text)):
        return text
    if damaged == "refuse":
        what = "NUL" if nul else "half a character (a lone surrogate)"
        raise UserError(f"{where} holds {what}, so it is not plain text {REPLACE_HINT}")
    return SURROGATE.sub("\ufffd", text.replace("\0", "\ufffd"))


@contextlib.contextmanager
def decoding_errors(name: str) -> Iterator[None]:
    """Converts errors of the operating system and of decompressors to user errors that name the file."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, TypeError, LookupError, NotImplementedError) as error:
        if not type(error).__module__.startswith("pyarrow"):
            raise
        raise UserError(f"{name} cannot be read: {' '.join(str(error).split())}") from None


class Record(NamedTuple):
    text: str
    where: str
    """Its location for error messages: line 3 of a.jsonl."""


def lines_of(blocks: Iterable[str], name: str) -> Iterator[str]:
    """The lines of a text that is read in blocks, each with its line break."""
    parts: list[str] = []
    length = 0
    for block in blocks:
        *complete, rest = block.split("\n")
        for line in complete:
            yield "".join((*parts, line, "\n"))
            parts, length = [], 0
        parts.append(rest)
        length += len(rest)
        if length > LONGEST_LINE:
            raise UserError(f"{name} has a line of more than {LONGEST_LINE >> 20} MB; write one record per line")
    if last := "".join(parts):
        yield last


def json_records(
    lines: Iterator[str], text_at: Callable[[Any, str], str], name: str, spread: bool = False
) -> Iterator[Record]:
    """The records of JSON Lines or of one JSON list; with `spread`, also a single record over several lines.

    `text_at` gives the text of a parsed record, which is at the place named by its second argument.
    """
    begun = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not begun and (line.lstrip().startswith("[") or (spread and not _is_json(line))):
            records = _parse_json(_read_all(line, lines, name), name)
            for index, record in enumerate(records if isinstance(records, list) else [records]):
                where = f"entry {index} of {name}"
                yield Record(text_at(record, where), where)
            return
        begun, where = True, f"line {number} of {name}"
        yield Record(text_at(_parse_json(line, where), where), where)


def _read_all(first: str, lines: Iterator[str], name: str) -> str:
    parts, size = [], 0
    for line in chain([first], lines):
        parts.append(line)
        size += len(line)
        if size > LONGEST_LINE:
            raise UserError(
                f"{name} is one JSON value of more than {LONGEST_LINE >> 20} MB, which is more than is read at once; "
                "write one record per line, as .jsonl"
            )
    return "".join(parts)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None


def text_of(record: Any, field: str, where: str) -> str:
    """The text of a record: the values of the comma-separated fields, joined by spaces."""
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a record with fields: {str(record)[:40]!r}")
    texts = []
    for key in field.split(","):
        if key not in record:
            raise UserError(f"{where} has no field {key!r}; it has {', '.join(record)}: give data.field=...")
        if not isinstance(record[key], str):
            raise UserError(
                f"field {key!r} in {where} is {type(record[key]).__name__}, not a string: give data.field=..."
            )
        texts.append(record[key])
    return " ".join(texts)


def table_rows(lines: Iterator[str], delimiter: str, quoted: bool, field: str, name: str) -> Iterator[Record]:
    """The rows of a table. The first row is the header, unless `field` selects columns by number."""
    keys = field.split(",")
    rows = _rows(lines, delimiter, quoted, name)
    if all(re.fullmatch("[1-9][0-9]*", key) for key in keys):
        columns = [int(key) - 1 for key in keys]
    else:
        _, header = next(rows, (1, []))
        missing = [key for key in keys if key not in header]
        if missing:
            raise UserError(
                f"{name} has no column {missing[0]!r}; its first row is {', '.join(header)[:80]!r}: "
                "give data.field=..., or column numbers from 1 if there is no header"
            )
        columns = [header.index(key) for key in keys]
    for number, row in rows:
        if len(row) <= max(columns):
            raise UserError(f"line {number} of {name} has {len(row)} columns, and column {max(columns) + 1} is wanted")
        yield Record(" ".join(row[column] for column in columns), f"line {number} of {name}")


def strictly_quoted(lines: Iterator[str], delimiter: str) -> bool:
    """Whether a table uses quoting: parsed with it, every row is complete and all have the same number of columns.

    Most .tsv files use none, and a quote in them is an ordinary character.
    """
    try:
        return len({len(row) for _, row in _rows(lines, delimiter, True, "")}) <= 1
    except UserError:
        return False


def _rows(lines: Iterator[str], delimiter: str, quoted: bool, name: str) -> Iterator[tuple[int, list[str]]]:
    """The non-empty rows, each with the number of its first line."""
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(
        lines, delimiter=delimiter, strict=True, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    )
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = "a quote is opened and never closed" if "unexpected end" in str(error) else str(error)
            raise UserError(f"line {number} of {name} is not CSV: {reason}") from None
        if row:
            yield number, row


def parquet_rows(raw: IO[bytes], field: str, name: str, seen: Callable[[int], None]) -> Iterator[Record]:
    """The rows of a parquet file; `seen` receives the number of bytes read so far."""
    file = arrow().parquet.ParquetFile(raw)
    names = file.schema_arrow.names
    keys = field.split(",")
    for key in keys:
        if key not in names:
            raise UserError(f"{name} has no field {key!r}; it has {', '.join(names)}: give data.field=...")
        if names.count(key) > 1:
            raise UserError(f"{name} has {names.count(key)} fields {key!r}, and one is wanted: give data.field=...")
    number = 0
    for batch in file.iter_batches(batch_size=1024, columns=keys):
        columns = [batch.column(key).to_pylist() for key in keys]
        for values in zip(*columns, strict=True):
            number += 1
            where = f"row {number} of {name}"
            yield Record(text_of(dict(zip(keys, values, strict=True)), field, where), where)
        seen(raw.tell())


def arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading .parquet and .zst needs pyarrow; try pip install 'adlm[data]'") from None
    return pyarrow
