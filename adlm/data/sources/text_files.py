"""Documents from local text files in every supported format, plain or compressed, in chunks that are tokenised apart.

Chunks bound the memory that a very long document needs and let it be tokenised in parallel. A chunk ends before
whitespace, between two words if possible. Tokenizers that pre-tokenise text into words, as GPT-2's and BERT's do, never
merge across such a boundary, so the ids are those of the whole document. Other tokenizers (SentencePiece over whole
lines, for example) may give different ids around a boundary, and so may any tokenizer in FARTHEST * CHUNK characters
without whitespace, which are cut at that length. The boundaries depend on the document alone, not on how it was read.
"""

import glob
import hashlib
import io
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from adlm.data.sources.conversations import conversation_document
from adlm.data.sources.decoding import (
    BLOCK,
    COMPRESSED,
    PLAIN,
    RECORDS,
    Record,
    arrow,
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
    text_of,
)
from adlm.errors import UserError

CHUNK = 2**16  # characters
FARTHEST = 4  # chunk lengths that are searched for a boundary

SEPARATORS = {"file": None, "line": re.compile(r"\n"), "blank": re.compile(r"\r?\n(?:[ \t\r]*\n)+")}
"""Separator of documents in plain text for each value of data.boundary; None if the whole file is one document."""

LAST_BREAK = re.compile(r"\r?\n[ \t\r]*\Z")
"""Line break at the end of the last document, for boundary "blank"."""

WORDS, BLANKS = re.compile(r"\w \w"), re.compile(r"(?<=\S)\s")
"""A chunk ends between two words, or otherwise before any whitespace."""


class Chunk(NamedTuple):
    text: str
    ends: bool
    """Whether this is the last chunk of its document."""


def split_into_chunks(document: str) -> Iterator[Chunk]:
    """The chunks of one document."""
    start = 0
    for end in _cuts(document):
        yield Chunk(document[start:end], False)
        start = end
    yield Chunk(document[start:], True)


def join_chunks(blocks: Iterable[str], boundary: str, whole: bool = False) -> Iterator[Chunk]:
    """The chunks of the documents of a text that is read in blocks of any size.

    Empty documents are dropped for boundary "blank". With `whole`, each document is one chunk.
    """
    separator, buffer, inside = SEPARATORS[boundary], "", False
    for block in chain(blocks, [None]):
        buffer += block or ""
        # whitespace at the end of a block may continue in the next one, so it is not split yet
        known = len(buffer.rstrip()) if boundary == "blank" and block is not None else len(buffer)
        buffer, waiting = buffer[:known], buffer[known:]
        if separator is not None:
            *complete, buffer = separator.split(buffer)
            for document in complete:
                if inside or boundary == "line" or document.strip():
                    yield from [Chunk(document, True)] if whole else split_into_chunks(document)
                inside = False
        if boundary == "blank" and block is None:
            buffer = LAST_BREAK.sub("", buffer) if inside or buffer.strip() else ""
        if not whole:
            start = 0
            for end in _cuts(buffer):
                yield Chunk(buffer[start:end], False)
                start, inside = end, True
            buffer = buffer[start:]
        buffer += waiting
    if inside or buffer:
        yield Chunk(buffer, True)


def _cuts(text: str) -> Iterator[int]:
    """The chunk boundaries in a text that may continue; some text always remains after the last one."""
    start = 0
    while len(text) - start > 2 * CHUNK and (end := _cut(text, start)):
        yield end
        start = end


def _cut(text: str, start: int) -> int:
    """The end of the chunk that begins at `start`, or 0 if more text is needed to determine it."""
    first, last = start + CHUNK // 2, start + CHUNK
    space = last
    while (space := text.rfind(" ", first, space)) >= 0:
        if WORDS.match(text, space - 1, last):
            return space
    if found := [match.start() for match in BLANKS.finditer(text, first, last)]:
        return found[-1]
    farthest = start + FARTHEST * CHUNK
    if len(text) <= farthest:
        return 0
    later = BLANKS.search(text, last, farthest)
    return later.start() if later else farthest


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
    format: str = "text"
    """text, or pairs: a document is then a conversation in JSON, in one chunk."""
    field: str = "text"
    boundary: str = "file"
    damaged: str = "refuse"
    line: Callable[[str], str] | None = None
    """Maps a line to a document, for named corpora; blank lines are then documents too. None skips blank lines."""
    transform: Callable[[str], str] = identity
    share: tuple[float, float] = (0.0, 1.0)
    """The range of the decompressed bytes that is read, as fractions."""
    whole: bool = False
    """Whether a document is one chunk of any length."""
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
                return int(arrow().parquet.ParquetFile(self.path).metadata.num_rows)
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
        is_mapped = self.transform is not identity or self.line is not None
        chunks = join_chunks(self._blocks(raw, seen), self.boundary, is_mapped or self.whole)
        if self.line is None and self.boundary == "line":
            chunks = _without_blank_lines(chunks)
        for text, ends in chunks:
            if self.line is not None:
                text = self.line(text)
            yield from self._divide(self.transform(text)) if is_mapped else [Chunk(text, ends)]

    def _chunks_of_records(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[Chunk]:
        for text, where in self._records(raw, seen):
            if self.format == "pairs":
                yield Chunk(text, True)
                continue
            yield from self._divide(self.transform(check_text(text, self.damaged, where)))

    def _divide(self, document: str) -> Iterator[Chunk]:
        return iter([Chunk(document, True)]) if self.whole else split_into_chunks(document)

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

        def text_at(record: Any, where: str) -> str:
            if self.format == "pairs":
                return conversation_document(record, self.damaged, where)
            return text_of(record, self.field, where)

        return json_records(lines, text_at, self.name, spread=self._form == ".json")

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
