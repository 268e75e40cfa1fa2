"""Files of text in any usual form, plain or compressed, as documents. Knows no corpora by name and no ids."""

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
    COMPRESSED,
    PLAIN,
    RECORDS,
    check_text,
    decoding_errors,
    decompressed,
    form_of,
    suffix_of,
    text_blocks,
)
from adlm.data.sources.records import (
    Record,
    arrow_parquet,
    json_records,
    lines_of,
    parquet_rows,
    strictly_quoted,
    table_rows,
)
from adlm.errors import UserError


def same(text: str) -> str:
    return text


def ignore(num_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class TextFile:
    """One file, and how its documents are found in it."""

    path: Path
    name: str
    """What it is called in messages and manifests."""
    split: str = ""
    """The split it belongs to; empty where documents are divided among splits."""
    field: str = "text"
    boundary: str = "file"
    damaged: str = "refuse"
    line: Callable[[str], str] | None = None
    """What a line of a named corpus stands for; blank lines count then, and do not where this is empty."""
    transform: Callable[[str], str] = same
    share: tuple[float, float] = (0.0, 1.0)
    """From where to where in the plain bytes it is read."""
    cut: tuple[int, int] | None = None
    """A document, by its number in the file, and the character of it at which another document begins."""

    @property
    def size(self) -> int:
        return self._first_seen[0]

    def fingerprint(self) -> str:
        """sha256 of the file as it lies there."""
        with decoding_errors(self.name), self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def pieces(self, seen: Callable[[int], None] = ignore) -> Generator[Chunk, None, None]:
        """Every document of the file, in order; `seen` is told now and then how many of its bytes have been read."""
        before = self._first_seen
        with decoding_errors(self.name), self.path.open("rb") as raw:
            pieces = (
                self._of_records(self._records(raw, seen))
                if self._form in RECORDS
                else self._of_text(self._blocks(raw, seen))
            )
            yield from pieces if self.cut is None else _cut(pieces, *self.cut)
        if self._look() != before:
            raise UserError(
                f"{self.name} changed while it was read; run the same command again when it no longer changes"
            )

    def num_documents(self) -> int:
        if self._form == ".parquet":
            with decoding_errors(self.name):
                return int(arrow_parquet().ParquetFile(self.path).metadata.num_rows)
        return sum(piece.ends for piece in self.pieces())

    @cached_property
    def _form(self) -> str:
        return form_of(self.path)

    @cached_property
    def _first_seen(self) -> tuple[int, int]:
        return self._look()

    def _look(self) -> tuple[int, int]:
        """Its size and when it was last written."""
        with decoding_errors(self.name):
            found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _of_text(self, blocks: Iterable[str]) -> Iterator[Chunk]:
        whole = self.transform is not same or self.line is not None
        pieces = join_chunks(blocks, self.boundary, whole)
        if self.line is None and self.boundary == "line":
            pieces = _without_blank_lines(pieces)
        for text, ends in pieces:
            if self.line is not None:
                text = self.line(text)
            yield from split_into_chunks(self.transform(text)) if whole else [Chunk(text, ends)]

    def _of_records(self, records: Iterable[Record]) -> Iterator[Chunk]:
        for text, where in records:
            yield from split_into_chunks(self.transform(check_text(text, self.damaged, where)))

    def _records(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[Record]:
        if self._form == ".parquet":
            if self.path.suffix.lower() in COMPRESSED:
                raise UserError(f"{self.name} is a parquet file compressed once more; unpack it")
            return parquet_rows(raw, self.field, self.name, seen)
        lines = lines_of(self._blocks(raw, seen), self.name)
        if self._form in (".csv", ".tsv"):
            delimiter = "," if self._form == ".csv" else "\t"
            return table_rows(lines, delimiter, self._is_quoted(delimiter), self.field, self.name)
        return json_records(lines, self.field, self.name, spread=self._form == ".json")

    def _is_quoted(self, delimiter: str) -> bool:
        """A .csv is; a .tsv is looked through once, to see whether it is."""
        if delimiter == ",":
            return True
        with self.path.open("rb") as raw:
            return strictly_quoted(lines_of(self._blocks(raw, ignore), self.name), delimiter)

    def _blocks(self, raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[str]:
        for block in text_blocks(self._shared(decompressed(raw, self.path)), self.name, self.damaged):
            yield block
            seen(raw.tell())

    def _shared(self, stream: IO[bytes]) -> IO[bytes]:
        if self.share == (0.0, 1.0):
            return stream
        text = stream.read()
        return io.BytesIO(text[round(self.share[0] * len(text)) : round(self.share[1] * len(text))])


def _without_blank_lines(pieces: Iterable[Chunk]) -> Iterator[Chunk]:
    """Lines without the \\r of Windows; one that is blank from its first piece to its last is none."""
    blank: list[Chunk] = []  # pieces at the beginning of a line, until something stands in it
    begun = False
    for text, ends in pieces:
        piece = Chunk(text.removesuffix("\r") if ends else text, ends)
        if begun or piece.text.strip():
            yield from (*blank, piece)
            blank, begun = [], not ends
        else:
            blank = [] if ends else [*blank, piece]


def _cut(pieces: Iterable[Chunk], document: int, at: int) -> Iterator[Chunk]:
    """The same text with one document in two: its first `at` characters, and the rest."""
    number = 0
    for text, ends in pieces:
        if number == document and 0 < at <= len(text):
            yield Chunk(text[:at], True)
            if text[at:]:
                yield Chunk(text[at:], ends)
        else:
            yield Chunk(text, ends)
        if number == document:
            at -= len(text)
        number += ends


def user_path(knob: str, value: str) -> Path:
    """A path as it is given, ~ and ~name replaced by home folders."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise UserError(f"{knob} {value} begins with the home folder of a user that does not exist") from None


def files_at(place: str, without: Sequence[Path] = ()) -> list[Path]:
    """The files that data.path names: one file, all text files of a folder and its folders, or what a glob matches.

    Hidden ones are left out, and those in the folders `without`.
    """
    path = user_path("data.path", place)
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
        raise UserError(f"data.path {place} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if is_folder:
        found = [file for file in found if suffix_of(file) in (*PLAIN, *RECORDS) and not _hidden(file, path)]
    if not found and is_folder:
        known = " ".join((*PLAIN, *RECORDS))
        raise UserError(f"data.path {place} is a folder without a text file; one ends in {known} (and {COMPRESSED[0]})")
    if not found and other is not None:
        raise UserError(f"data.path {place} is {_kind(other)}, not a regular file; write the text to a file first")
    if not found:
        raise UserError(f"data.path {place} does not exist, and as a glob it matches no file")
    return found


def _kind(path: Path) -> str:
    kinds = {"FIFO": path.is_fifo(), "socket": path.is_socket(), "device": path.is_char_device()}
    return f"a {next((kind for kind, fits in kinds.items() if fits), 'device')}"


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
