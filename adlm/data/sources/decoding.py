"""Decompresses and decodes files to valid text, with one-line errors. Independent of documents."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from adlm.data.sources.records import arrow
from adlm.errors import UserError

BLOCK = 2**20  # bytes read at once
COMPRESSED = (".gz", ".xz", ".bz2", ".zst", ".zip")
PLAIN, RECORDS = (".txt", ".md", ".text"), (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
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
