"""Files of text in any usual form, plain or compressed, as documents. Knows no corpora by name and no ids."""

import bz2
import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import lzma
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adlm.data.pieces import Piece, documents_of, in_pieces
from adlm.data.records import arrow, arrow_parquet, json_records, lines_of, parquet_rows, table_rows
from adlm.errors import UserError

BLOCK = 2**20  # bytes read at once
COMPRESSED = (".gz", ".xz", ".bz2", ".zst", ".zip")
PLAIN, RECORDS = (".txt", ".md", ".text"), (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


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

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        """sha256 of the file as it lies there."""
        with _told(self.name), self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def pieces(self, seen: Callable[[int], None] = ignore) -> Generator[Piece, None, None]:
        """Every document of the file, in order; `seen` is told now and then how many of its bytes have been read."""
        with _told(self.name), self.path.open("rb") as raw:
            if self._suffix == ".parquet":
                yield from self._of_records(parquet_rows(raw, self.field, self.name, seen))
                return
            blocks = text_blocks(self._shared(_decompressed(raw, self.path)), self.name, self.damaged)
            blocks = _telling(blocks, raw, seen)
            yield from self._of_records(self._records(blocks)) if self._suffix in RECORDS else self._of_text(blocks)

    def num_documents(self) -> int:
        if self._suffix == ".parquet":
            with _told(self.name):
                return int(arrow_parquet().ParquetFile(self.path).metadata.num_rows)
        return sum(piece.ends for piece in self.pieces())

    @property
    def _suffix(self) -> str:
        return suffix_of(self.path)

    def _of_text(self, blocks: Iterable[str]) -> Iterator[Piece]:
        by_line = self.boundary == "line"
        whole = self.transform is not same or self.line is not None
        for text, ends in documents_of(blocks, self.boundary, whole):
            if self.line is not None:
                text = self.line(text)
            elif by_line:
                text = text.removesuffix("\r")
                if ends and not text.strip():
                    continue
            yield from in_pieces(self.transform(text)) if whole else [Piece(text, ends)]

    def _of_records(self, texts: Iterable[str]) -> Iterator[Piece]:
        for text in texts:
            if "\0" in text:
                if self.damaged == "refuse":
                    raise _nul(self.name)
                text = text.replace("\0", "\ufffd")
            yield from in_pieces(self.transform(text))

    def _records(self, blocks: Iterator[str]) -> Iterator[str]:
        lines = lines_of(blocks, self.name)
        if self._suffix in (".csv", ".tsv"):
            return table_rows(lines, "," if self._suffix == ".csv" else "\t", self.field, self.name)
        return json_records(lines, self.field, self.name)

    def _shared(self, stream: IO[bytes]) -> IO[bytes]:
        if self.share == (0.0, 1.0):
            return stream
        text = stream.read()
        return io.BytesIO(text[round(self.share[0] * len(text)) : round(self.share[1] * len(text))])


def suffix_of(path: Path) -> str:
    """.jsonl for both a.jsonl and a.jsonl.gz."""
    path = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return path.suffix.lower()


def files_at(place: str) -> list[Path]:
    """The files that data.path names: one file, all text files of a folder and its folders, or what a glob matches."""
    path = Path(place).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and suffix_of(file) in (*PLAIN, *RECORDS))
        known = " ".join((*PLAIN, *RECORDS))
        if not found:
            raise UserError(
                f"data.path {place} is a folder without a text file; one ends in {known} (and {COMPRESSED[0]})"
            )
        return found
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        raise UserError(f"data.path {place} does not exist, and as a glob it matches no file")
    return found


def _decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    """The plain bytes of a file, by what its name ends in."""
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
            return _only_member(raw, path)
        case _:
            return raw


def _only_member(raw: IO[bytes], path: Path) -> IO[bytes]:
    archive = zipfile.ZipFile(raw)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise UserError(f"{path.name} holds {len(members)} files; unpack it, and give the folder")
    return archive.open(members[0])


def _telling(blocks: Iterable[str], raw: IO[bytes], seen: Callable[[int], None]) -> Iterator[str]:
    for block in blocks:
        yield block
        seen(raw.tell())


def text_blocks(stream: IO[bytes], name: str, damaged: str) -> Iterator[str]:
    """The text of a stream of bytes, a block at a time; what is no text is refused or replaced."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict" if damaged == "refuse" else "replace")
    read = 0
    while True:
        block = stream.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = read + len(block) - len(error.object) + error.start
            looks = "; it looks like UTF-16, so convert it" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
            raise UserError(
                f"{name} is not UTF-8 text: byte {at:,} is {error.object[error.start]:#04x}{looks} "
                "(data.damaged=replace reads it all the same)"
            ) from None
        if "\0" in text:
            if damaged == "refuse":
                raise _nul(name)
            text = text.replace("\0", "\ufffd")
        yield text
        if not block:
            return
        read += len(block)


def _nul(name: str) -> UserError:
    return UserError(f"{name} holds NUL bytes, so it is not plain text (data.damaged=replace reads it all the same)")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """What the operating system or a decompressor says of a file, as a sentence."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        if not type(error).__module__.startswith("pyarrow"):
            raise
        raise UserError(f"{name} cannot be read: {error}") from None
