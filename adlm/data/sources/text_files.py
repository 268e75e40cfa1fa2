"""Documents from local text files in every supported format, plain or compressed. Independent of tokenizers."""

import glob
import hashlib
import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from adlm.data.sources.chunks import Chunk, join_chunks, split_into_chunks
from adlm.data.sources.decoding import (
    BLOCK,
    COMPRESSED,
    PLAIN,
    RECORDS,
    Record,
    arrow_parquet,
    check_text,
    decoding_errors,
    decompressed,
    form_of,
    json_records,
    lines_of,
    parquet_rows,
    strictly_quoted,
    suffix_of,
    table_rows,
    text_blocks,
)
from adlm.errors import UserError


def identity(text: str) -> str:
    return text


def ignore_progress(num_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class TextFile:
    """One file, and how it is divided into documents."""

    path: Path
    name: str
    """Its name in messages and manifests."""
    split: str = ""
    """Its split; empty if its documents are divided among splits."""
    field: str = "text"
    boundary: str = "file"
    damaged: str = "refuse"
    line: Callable[[str], str] | None = None
    """Maps a line to a document, for named corpora; blank lines are then documents too. None skips blank lines."""
    transform: Callable[[str], str] = identity
    share: tuple[float, float] = (0.0, 1.0)
    """The range of the decompressed bytes that is read, as fractions."""
    cut: tuple[int, int] | None = None
    """(document, character): the document with this number is cut in two at this character."""

    @property
    def size(self) -> int:
        return self._initial_stat[0]

    def fingerprint(self) -> str:
        """SHA-256 of the file as stored."""
        with decoding_errors(self.name), self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        """The documents of the file in order, in chunks; `seen` is called with the number of bytes read so far."""
        before = self._initial_stat
        with decoding_errors(self.name), self.path.open("rb") as raw:
            chunks = (self._chunks_of_records if self._form in RECORDS else self._chunks_of_text)(raw, seen)
            yield from chunks if self.cut is None else _cut_document(chunks, *self.cut)
        if self._stat() != before:
            raise UserError(
                f"{self.name} changed while it was read; run the same command again when it no longer changes"
            )

    def num_documents(self) -> int:
        if self._form == ".parquet":
            with decoding_errors(self.name):
                return int(arrow_parquet().ParquetFile(self.path).metadata.num_rows)
        return sum(chunk.ends for chunk in self.chunks())

    def has_crlf(self) -> bool:
        """Whether the beginning of a plain text has the line breaks of Windows, which are read as LF."""
        if self._form in RECORDS:
            return False
        with decoding_errors(self.name), self.path.open("rb") as raw:
            return b"\r\n" in decompressed(raw, self.path).read(BLOCK)

    @cached_property
    def _form(self) -> str:
        return form_of(self.path)

    @cached_property
    def _initial_stat(self) -> tuple[int, int]:
        return self._stat()

    def _stat(self) -> tuple[int, int]:
        """Size in bytes and modification time in nanoseconds."""
        with decoding_errors(self.name):
            found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _chunks_of_text(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[Chunk]:
        whole = self.transform is not identity or self.line is not None
        chunks = join_chunks(self._blocks(raw, seen), self.boundary, whole)
        if self.line is None and self.boundary == "line":
            chunks = _without_blank_lines(chunks)
        for text, ends in chunks:
            if self.line is not None:
                text = self.line(text)
            yield from split_into_chunks(self.transform(text)) if whole else [Chunk(text, ends)]

    def _chunks_of_records(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[Chunk]:
        for text, where in self._records(raw, seen):
            yield from split_into_chunks(self.transform(check_text(text, self.damaged, where)))

    def _records(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[Record]:
        if self._form == ".parquet":
            if self.path.suffix.lower() in COMPRESSED:
                raise UserError(f"{self.name} is a parquet file compressed once more; unpack it")
            return parquet_rows(raw, self.field, self.name, seen)
        lines = lines_of(self._blocks(raw, seen), self.name)
        if self._form in (".csv", ".tsv"):
            delimiter, quoted = ("," if self._form == ".csv" else "\t"), True
            if delimiter == "\t":  # a .tsv file is read once to find out whether it uses quoting
                with self.path.open("rb") as first:
                    first_lines = lines_of(self._blocks(first, ignore_progress), self.name)
                    quoted = strictly_quoted(first_lines, delimiter)
            return table_rows(lines, delimiter, quoted, self.field, self.name)
        return json_records(lines, self.field, self.name, spread=self._form == ".json")

    def _blocks(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[str]:
        stream = decompressed(raw, self.path)
        if self.share != (0.0, 1.0):
            content = stream.read()
            start, stop = (round(share * len(content)) for share in self.share)
            stream = io.BytesIO(content[start:stop])
        for block in text_blocks(stream, self.path, self.name, self.damaged):
            yield block
            seen(raw.tell())


def _without_blank_lines(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The lines that are not blank."""
    blank: list[Chunk] = []  # chunks at the beginning of a line that are blank so far
    begun = False
    for chunk in chunks:
        if begun or chunk.text.strip():
            yield from (*blank, chunk)
            blank, begun = [], not chunk.ends
        else:
            blank = [] if chunk.ends else [*blank, chunk]


def _cut_document(chunks: Iterable[Chunk], document: int, at: int) -> Iterator[Chunk]:
    """The same chunks, with one document cut in two after its first `at` characters."""
    number = 0
    for text, ends in chunks:
        if number == document and 0 < at <= len(text):
            yield Chunk(text[:at], True)
            if text[at:]:
                yield Chunk(text[at:], ends)
        else:
            yield Chunk(text, ends)
        if number == document:
            at -= len(text)
        number += ends


def user_path(option: str, value: str) -> Path:
    """The path given for an option, with ~ and ~name expanded."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise UserError(f"{option} {value} begins with the home folder of a user that does not exist") from None


def files_at(pattern: str, without: Sequence[Path] = ()) -> list[Path]:
    """The files that data.path selects: one file, all text files below a folder, or the matches of a glob.

    Files in the folders `without` are excluded, and hidden files of a folder.
    """
    path = user_path("data.path", pattern)
    try:
        if path.is_file():
            return [path]
        is_folder = path.is_dir()
        names = list(path.rglob("*") if is_folder else map(Path, glob.glob(str(path), recursive=True)))
        found = sorted(
            file
            for file in names
            if file.is_file() and not any(file.resolve().is_relative_to(folder) for folder in without)
        )
        other = next((name for name in names if name.exists() and not name.is_dir() and not name.is_file()), None)
    except (OSError, ValueError) as error:
        raise UserError(f"data.path {pattern} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if is_folder:
        hidden = {file for file in found if any(part.startswith(".") for part in file.relative_to(path).parts)}
        found = [file for file in found if suffix_of(file) in (*PLAIN, *RECORDS) and file not in hidden]
    if not found and is_folder:
        known = " ".join((*PLAIN, *RECORDS))
        raise UserError(
            f"data.path {pattern} is a folder without a text file; supported are {known} (and {COMPRESSED[0]})"
        )
    if not found and other is not None:
        kind = "FIFO" if other.is_fifo() else "socket" if other.is_socket() else "device"
        raise UserError(f"data.path {pattern} is a {kind}, not a regular file; write the text to a file first")
    if not found:
        raise UserError(f"data.path {pattern} does not exist, and as a glob it matches no file")
    return found
