"""Atomic writes of files and folders, locks, journals, checks of output paths, and reading of JSON.

A file or folder is written next to its target under a temporary name that ends in `.adlm-part`, and renamed when it is
complete. The writer holds a lock on it, so leftovers of killed processes can be distinguished from files that are still
being written; the next write to the same target deletes them.
"""

import ctypes
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from adlm.errors import UserError

PART = ".adlm-part"
JSON_LIMIT = 2**28
"""Size in bytes of the largest JSON file that is read; ours are far smaller."""
METRICS_LIMIT = 2**36
"""Size in bytes of the largest metrics.jsonl that is read."""

# How files written by adlm start, and how they name adlm as their creator: HTML, and plots in PNG, SVG and PDF.
MARKS = (
    (b"<!doctype html>", b'<meta name="generator" content="adlm"'),
    (b"\x89PNG", b"Software\0adlm"),
    (b"<?xml", b"<dc:title>adlm<"),
    (b"%PDF", b"/Creator (adlm)"),
)
JSON_MARK, SAMPLES_MARK = b'{"adlm":', b'{"made_by": {"adlm":'
PLOT_METADATA = {
    ".png": {"Software": "adlm"},
    ".svg": {"Creator": "adlm", "Date": None},
    ".pdf": {"Creator": "adlm", "CreationDate": None},
}
"""Metadata of a plot by suffix, for matplotlib: the creator, and no date, so that equal plots are equal files."""


def refuse_taken(folder: Path) -> None:
    """A user error if the path exists and is not an empty folder."""
    with reporting_os_errors(folder):
        taken = folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    if taken:
        raise UserError(f"{folder} exists already; give another path, or move it away")


def check_output(path: Path | None, option: str = "--out", force: bool = False, inputs: Iterable[Path] = ()) -> None:
    """A user error, before any work is done, if writing the file would fail or destroy data.

    A file that adlm wrote may be replaced, any other only with `force`, and an input of the command never: neither an
    input file nor a file in an input folder, except for results and samples that adlm wrote there.
    """
    if path is None:
        return
    target = path.absolute()
    with reporting_os_errors(path, f"{option} {path} cannot be written"):
        if not target.parent.is_dir() or not target.name:
            raise UserError(f"{option} {path}: there is no folder {target.parent}")
        if target.exists() and not target.is_file():
            raise UserError(f"{option} {path} is not a regular file; give another path")
        if target.exists():
            _check_replaceable(target, f"{option} {path}", force, inputs)
        with tempfile.TemporaryFile(dir=target.parent):
            pass  # the folder is writable
        if len(os.fsencode(target.name)) + len(PART) + 12 > os.pathconf(target.parent, "PC_NAME_MAX"):
            raise UserError(f"{option} {path}: the file name is too long; give a shorter one")


def _check_replaceable(target: Path, name: str, force: bool, inputs: Iterable[Path]) -> None:
    written_by_us = written_by_adlm(target)
    is_foreign = not written_by_us and not holds_samples(target)
    for each in inputs:
        is_same = each.exists() and target.samefile(each)
        if is_same or (is_foreign and each.resolve() in target.resolve().parents):
            raise UserError(f"{name} is what this command reads; give another path")
    if not force and not written_by_us:
        raise UserError(f"{name} exists and was not written by adlm; give another path, or add --force")


def holds_samples(path: Path) -> bool:
    """Whether a file begins like a samples file."""
    with opened(path) as file:
        return file.read(64).startswith(SAMPLES_MARK)


def written_by_adlm(path: Path) -> bool:
    """Whether the content of a file marks it as written by adlm, or it is empty."""
    with path.open("rb") as file:
        content = file.read(2**24)
    if not content or b"".join(content[:64].split()).startswith(JSON_MARK):
        return True
    return any(content.startswith(start) and mark in content for start, mark in MARKS)


@contextmanager
def reporting_os_errors(path: Path, problem: str = "") -> Iterator[None]:
    """Operating system errors in the block, of reading or writing, become user errors with the path and the reason.

    `problem` is the start of the message, by default "PATH cannot be written".
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) or (not isinstance(error, OSError) and "null byte" not in str(error)):
            raise
        raise UserError(f"{problem or f'{path} cannot be written'}: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The reason of an operating system error, in one phrase."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.strerror}; make room, then run the same command again"
    return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; after the block the file is synced and atomically replaces `path`.

    If `path` is a symbolic link, its target is replaced.
    """
    with reporting_os_errors(path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise UserError(f"{path} is not a regular file; give another path")
        part = _temporary_path(target)
        remove_parts(target.parent, target.name)
        with part.open("xb") as file:
            _lock(file.fileno())
            try:
                yield part
                sync(part)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        sync(target.parent)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty temporary folder to fill; after the block it atomically replaces `folder`, without any check."""
    with reporting_os_errors(folder):
        target = folder.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _temporary_path(target)
        remove_parts(target.parent, target.name)
        part.mkdir()
        descriptor = os.open(part, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield part
            for path in (*part.rglob("*"), part):
                sync(path)
            move_folder(part, target)
            sync(target.parent)
        finally:
            os.close(descriptor)
            shutil.rmtree(part, ignore_errors=True)


def move_folder(new: Path, target: Path) -> None:
    """Rename the folder `new` to `target`. An existing folder at `target` is renamed to `new` in exchange."""
    if target.exists() and not _exchange(new, target):
        backup = _temporary_path(target, "old")
        target.rename(backup)
        try:
            new.rename(target)
        except OSError:
            backup.rename(target)
            raise
        backup.rename(new)
    elif not target.exists():
        new.rename(target)


def remove_folder(folder: Path) -> None:
    """Delete a folder. If this is interrupted, the next write to the same path deletes the rest."""
    remove_parts(folder.parent, folder.name)
    part = _temporary_path(folder, "old")
    folder.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def remove_parts(folder: Path, name: str = "*") -> None:
    """Delete the temporary files and folders of killed processes for this target name, or for all with `*`."""
    pattern = (
        name if name == "*" else "".join(f"[{character}]" if character in "*?[" else character for character in name)
    )
    for part in folder.glob(f".{pattern}.*{PART}"):
        with suppress(OSError):  # it is already gone, or may not be deleted
            descriptor = os.open(part, os.O_RDONLY)
            try:
                if lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(part) if part.is_dir() else part.unlink()
            finally:
                os.close(descriptor)


def _temporary_path(target: Path, kind: str = "new") -> Path:
    return target.with_name(f".{target.name}.{kind}{os.getpid()}{PART}")


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks: leftovers then stay
        lock_descriptor(descriptor, blocking=False)


def sync(path: Path) -> None:
    """Write what the system has of a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Atomically exchange two paths (Linux renameat2); False if the system does not support it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    return bool(rename(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0)


def lock_file(file: IO[Any], problem: str, seconds: float = 0) -> None:
    """Lock an open file until it is closed or the process ends; a user error if another process keeps it locked."""
    end = time.monotonic() + seconds
    with reporting_os_errors(Path(file.name)):
        while not lock_descriptor(file.fileno(), blocking=False):
            if time.monotonic() >= end:
                raise UserError(problem)
            time.sleep(0.1)


def append_synced(file: FileIO, content: bytes) -> None:
    """Append to an unbuffered file and sync it to disk. If this fails, the file gets its previous length back."""
    end = os.fstat(file.fileno()).st_size
    try:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise


class Journal:
    """An append-only file of JSON lines from which an interrupted command resumes. It is locked while it is open.

    With a header, the first line says what the other lines, the entries, depend on; it is written with the first entry.
    Each append is synced to disk, or leaves the file as it was. A last line that a killed process left incomplete is
    not an entry, and is cut off by the next append.
    """

    def __init__(
        self,
        path: Path,
        busy: str,
        header: Mapping[str, Any] | None = None,
        resumes: Callable[[Any], bool] | None = None,
    ):
        """Open a journal, or create an empty one; `busy` is the error if another process has it open.

        A file with another first line is refused, unless `resumes` decides: it gets the content of that line, None if
        it is not JSON, and returns whether to keep the file; if not, the file is overwritten.
        """
        self.path, self._header, self._end = path, b"" if header is None else _json_line(header), 0
        with reporting_os_errors(path):
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is not a regular file; give another path")
            self._file = path.open("a+b", buffering=0)
        try:
            lock_file(self._file, busy)
            if self.is_empty:
                with reporting_os_errors(path):
                    sync(path.resolve().parent)  # else a power failure may take the name of a new file
            if header is not None:
                self._file.seek(0)
                first = self._file.readline(len(self._header) + 2**20)
                # an empty file and an incomplete header are the beginning of this journal
                if not self._header.startswith(first) and not (resumes or self._refuse)(_parsed(first)):
                    os.ftruncate(self._file.fileno(), 0)
                    first = b""
                self._end = len(first) if first.endswith(b"\n") else 0
        except BaseException:
            self._file.close()
            raise

    def _refuse(self, content: Any) -> bool:
        raise UserError(f"{self.path} exists and is not the journal of this command; move it away")

    def entries(self) -> Iterator[Any]:
        """The entries on disk; None for a line that is not JSON.

        The next append comes after the last entry that was taken: to drop an entry and all after it, leave the loop.
        """
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(self._end)
            for line, content in json_lines(file):
                yield content
                self._end += len(line)

    def append(self, *entries: Any) -> None:
        """Append the entries and sync them to disk, after what was kept."""
        if os.fstat(self._file.fileno()).st_size != self._end:
            os.ftruncate(self._file.fileno(), self._end)
        if entries:
            data = b"".join([b"" if self._end else self._header, *map(_json_line, entries)])
            append_synced(self._file, data)
            self._end += len(data)

    def restart(self, header: Mapping[str, Any], *entries: Any) -> None:
        """Atomically replace the content by a header and entries: the new file is locked before it has the name."""
        self._header = _json_line(header)
        data = b"".join([self._header, *map(_json_line, entries)]) if entries else b""
        target = self.path.resolve()
        part = _temporary_path(target)
        new = part.open("a+b", buffering=0)
        try:
            _lock(new.fileno())
            append_synced(new, data)
            part.replace(target)
        except BaseException:
            new.close()
            part.unlink(missing_ok=True)
            raise
        sync(target.parent)
        self._file.close()
        self._file, self._end = new, len(data)

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._file.fileno()).st_size == 0

    def close(self) -> None:
        self._file.close()


def _json_line(content: Any) -> bytes:
    """UTF-8; a lone surrogate, of a file name that is not UTF-8, is written as its JSON escape."""
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def json_lines(file: IO[bytes]) -> Iterator[tuple[bytes, Any]]:
    """The complete lines of a file with their content, None if it is not JSON."""
    for line in file:
        if line.endswith(b"\n"):
            yield line, _parsed(line)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading; failures are user errors, and so are pipes and devices, which may not end."""
    with reporting_os_errors(path, f"{path} cannot be read"):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UserError(f"{path} has {size:,} bytes, more than the limit of {limit:,}")
        return file.read()


def file_sha256(path: Path) -> str:
    """sha256 of a regular file of any size."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The content of a JSON file; a user error if it is not valid JSON."""
    content = read_bytes(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """json.loads with ValueError as the only error, also for text that is nested too deeply or not UTF-8."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The valid lines of a metrics.jsonl; an empty list if there is no such file."""
    return scan_metrics(path)[0]


def scan_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The valid lines of a metrics.jsonl and the number of damaged ones, without counting an incomplete last line."""
    if not path.exists():
        return [], 0
    *complete, last = [_parse_line(line) for line in read_bytes(path, METRICS_LIMIT).split(b"\n")]
    lines = [line for line in (*complete, last) if line is not None]
    return lines, sum(line is None for line in complete)


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """A metrics line: finite numbers by name, including the step; None if it is invalid."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
        return None
    numbers = [value for value in line.values() if value is not None]
    return line if all(type(value) in (int, float) and abs(value) < math.inf for value in numbers) else None
