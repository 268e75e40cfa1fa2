"""Decompresses and decodes files to valid text, with one-line errors. Independent of documents."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import re
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


def text_blocks(stream: IO[bytes], name: str, damaged: str) -> Iterator[str]:
    """The decoded text of a byte stream in blocks; NUL and invalid UTF-8 are refused or replaced, as `damaged` says."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict" if damaged == "refuse" else "replace")
    read = 0
    while True:
        block = stream.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = read + len(block) - len(error.object) + error.start
            hint = "; it looks like UTF-16, so convert it" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
            raise UserError(
                f"{name} is not UTF-8 text: byte {at:,} is {error.object[error.start]:#04x}{hint} {REPLACE_HINT}"
            ) from None
        if "\0" in text and damaged == "refuse":
            at = read + block.index(b"\0")
            raise UserError(f"{name} holds NUL bytes, the first at byte {at:,}, so it is not plain text {REPLACE_HINT}")
        yield text.replace("\0", "\ufffd")
        if not block:
            return
        read += len(block)


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
