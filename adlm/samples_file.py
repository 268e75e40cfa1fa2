"""Samples on disk, a line of JSON each; the first line says how the others were made. Knows no models.

    {"made_by": {"adlm": "0.1.0", "model": "runs/own", "method": "adlm", ...}}
    {"row": 0, "canvas": 0, "seed": 0, "text": "...", "ids": [...]}

A file grows by whole batches, each on the disk before the next is begun. What a killed process leaves of a line is cut
off when the same samples are asked for again, and read by nobody.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from io import FileIO
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from adlm.config.load import differences
from adlm.errors import UserError
from adlm.files import opened, parse_json, writing


@dataclass(frozen=True)
class Provenance:
    """Everything that a file's samples depend on: made by the same, they are the same to the last byte."""

    adlm: str
    """The version of this code."""
    model: str
    """Where it was loaded from."""
    weights: str
    """sha256 of its weights."""
    method: str
    tokenizer: str
    length: int
    """The model's."""
    canvases: list[str]
    """Texts with holes, such as `[MASK*128]`; row i began as canvas i // num."""
    num: int
    """Samples of each canvas."""
    seed: int
    """Row i was drawn from (seed, i)."""
    sampling: Mapping[str, Any]
    """The sampler and every knob of it."""
    batch: int
    """Rows that walked side by side: a device rounds otherwise in another company."""
    device: str
    dtype: str
    """Of weights and products."""
    tokenizer_sha256: str | None = None
    """Which tokenizer wrote the ids; None in files from before it was told, when samplers drew other numbers too."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What a reader asks of the model and no sample depends on: size, symbols, training; empty in those files."""

    @property
    def num_rows(self) -> int:
        """Samples in a file that is complete."""
        return self.num * len(self.canvases)


KINDS: dict[str, type | tuple[type, ...]] = {
    "length": int,
    "canvases": list,
    "num": int,
    "seed": int,
    "sampling": dict,
    "batch": int,
    "tokenizer_sha256": (str, NoneType),
    "about": dict,
}
"""What a first line's entries are; all others are words."""


@dataclass(frozen=True)
class Sample:
    """One row."""

    row: int
    canvas: int
    """Which of the canvases it began as."""
    seed: int
    text: str
    """Of all the ids, special tokens written out: the published judges read bos and eos in it."""
    ids: list[int]


@dataclass(frozen=True)
class Samples:
    """A file to read, row by row as often as one likes, as far as it is written."""

    path: Path
    made_by: Provenance

    def __iter__(self) -> Iterator[Sample]:
        with opened(self.path) as file:
            lines = _whole_lines(file, self.path)
            next(lines)
            for _, sample in _rows(lines, self.made_by, self.path):
                yield sample


def read_samples(path: Path) -> Samples:
    """A file's samples and how they were made; a last line that is still being written, or was cut off, is none."""
    with opened(path) as file:
        _, first = next(_whole_lines(file, path), (0, None))
    return Samples(path, _made_by(first, path))


@contextmanager
def open_samples(path: Path, made_by: Provenance, force: bool = False) -> Iterator["SamplesWriter"]:
    """A file to append samples to, ours alone: new, or gone on with if it was made by the same.

    With `force`, a file that holds something else is begun anew. Without a single sample there is no file in the end.
    """
    with writing(path):
        was_there = path.exists()
        if was_there and not path.is_file():
            raise UserError(f"{path} is no file; give another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is being written by another process; wait for it, or stop it") from None
        try:
            yield SamplesWriter(file, path, made_by, force)
        finally:
            if not was_there and os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


class SamplesWriter:
    """An open file that goes on after its last whole line."""

    def __init__(self, file: FileIO, path: Path, made_by: Provenance, force: bool = False):
        self.num_rows, self._end = 0, 0
        self._file, self._path = file, path
        self._header = _line({"made_by": asdict(made_by)})
        file.seek(0)
        first = file.readline(len(self._header) + 2**20)
        if not self._header.startswith(first):  # else it is a header that is whole, torn, or not there yet
            try:
                _refuse_others(first, made_by, path)
            except UserError:
                if not force:
                    raise
                first = b""
        if first.endswith(b"\n"):
            file.seek(0)
            with open(file.fileno(), "rb", closefd=False) as buffered:
                lines = _whole_lines(buffered, path)
                self._end, _ = next(lines)
                for self._end, sample in _rows(lines, made_by, path):
                    self.num_rows = sample.row + 1
        self._cut()

    def append(self, samples: Sequence[Sample]) -> None:
        """Write the next rows, and return when they are on the disk."""
        data = b"".join([self._header] * (self._end == 0) + [_line(asdict(sample)) for sample in samples])
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._cut()
            raise UserError(
                f"{self._path} cannot be written: {error.strerror or error}; {self.num_rows} samples are in it, and "
                "the same command goes on after them"
            ) from None
        self._end += len(data)
        self.num_rows += len(samples)

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._end)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _refuse_others(first: bytes, made_by: Provenance, path: Path) -> None:
    """The sentence for a file that was made by something else, as far as its first line tells."""
    try:
        there = _made_by(parse_json(first), path)
    except ValueError:  # a UserError too
        raise UserError(f"{path} exists and is no file of samples; give another --out, or add --force") from None
    apart = differences(asdict(replace(there, about=made_by.about)), asdict(made_by))
    if apart:
        told = ", ".join(f"{name} {_short(was)} -> {_short(now)}" for name, (was, now) in apart.items())
        raise UserError(f"{path} holds samples that were made otherwise: {told}; give another --out, or add --force")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Where each line ends, in bytes, and what it says."""
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        try:
            content = parse_json(line)
        except ValueError:
            if number == 1:
                raise UserError(f"{path} is no file of samples: `adlm sample --out` writes lines of JSON") from None
            raise UserError(f"{path} is damaged: line {number} is no JSON; move it away") from None
        yield end, content


def _made_by(content: Any, path: Path) -> Provenance:
    entries = content.get("made_by") if isinstance(content, dict) else None
    known = {each.name for each in fields(Provenance)}
    always = {each.name for each in fields(Provenance) if each.default is MISSING and each.default_factory is MISSING}
    if not isinstance(entries, dict) or not always <= entries.keys() <= known:
        raise UserError(f"{path} is no file of samples: its first line does not say how they were made")
    for name, value in entries.items():
        if not isinstance(value, KINDS.get(name, str)):
            raise UserError(f"{path} is damaged: its first line has {name} {_short(value)}; move it away")
    return Provenance(**entries)


def _rows(lines: Iterator[tuple[int, Any]], made_by: Provenance, path: Path) -> Iterator[tuple[int, Sample]]:
    names = {each.name for each in fields(Sample)}
    for row, (end, content) in enumerate(lines):
        if not isinstance(content, dict) or content.keys() != names or content["row"] != row:
            raise UserError(f"{path} is damaged: line {row + 2} is not row {row}; move it away")
        if not _is_text(content["text"]) or not _are_ids(content["ids"]):
            raise UserError(f"{path} is damaged: row {row} on line {row + 2} is no text with its ids; move it away")
        if row >= made_by.num_rows:
            raise UserError(f"{path} is damaged: it has more than the {made_by.num_rows} rows of its first line")
        yield end, Sample(**content)


def _is_text(text: Any) -> bool:
    """JSON can write half a character, which is no text."""
    return isinstance(text, str) and re.search("[\ud800-\udfff]", text) is None


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(index) is int and 0 <= index < 2**31 for index in ids)
