"""Files and folders that appear whole or not at all, and what may be overwritten. Knows no formats but JSON.

A file or folder is written beside its place, under a name that ends in `.adlm-part`, and renamed when it is complete.
The writer holds a lock on it, so what a killed process left behind can be told from what is being written, and is
deleted by the next write to the same place.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from adlm.errors import UserError

PART = ".adlm-part"
JSON_LIMIT = 2**28
"""Bytes of the largest JSON file that is read; ours are far smaller."""

# How files that we write begin, and where they name adlm as their maker: pages, and pictures in PNG, SVG and PDF.
MARKS = (
    (b"<!doctype html>", b'<meta name="generator" content="adlm"'),
    (b"\x89PNG", b"Software\0adlm"),
    (b"<?xml", b"<dc:title>adlm<"),
    (b"%PDF", b"/Creator (adlm)"),
)
JSON_MARK, SAMPLES_MARK = b'{"adlm":', b'{"made_by": {"adlm":'
PICTURE_METADATA = {
    ".png": {"Software": "adlm"},
    ".svg": {"Creator": "adlm", "Date": None},
    ".pdf": {"Creator": "adlm", "CreationDate": None},
}
"""What matplotlib writes into a picture, by its suffix: its maker, and no date, so that equal pictures are equal."""


def refuse_taken(folder: Path) -> None:
    """A folder is written only where there is nothing, or an empty folder."""
    with writing(folder):
        taken = folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    if taken:
        raise UserError(f"{folder} exists already; give another place, or move it away")


def check_output(path: Path | None, option: str = "--out", force: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Refuse now what would fail or destroy something when the file is written, after hours perhaps.

    A file that adlm wrote is replaced, any other only with `force`, and what the command reads never: neither a file
    nor what is in a folder (but results and samples that adlm wrote may lie there).
    """
    if path is None:
        return
    place = path.absolute()
    with writing(path, f"{option} {path} cannot be written"):
        if not place.parent.is_dir() or not place.name:
            raise UserError(f"{option} {path}: there is no folder {place.parent}")
        if place.exists() and not place.is_file():
            raise UserError(f"{option} {path} is not a regular file; give another path")
        ours = place.exists() and written_by_adlm(place)
        foreign = not ours and not _holds_samples(place)
        if place.exists() and any(_is(each, place) or (foreign and _holds(each, place)) for each in inputs):
            raise UserError(f"{option} {path} is what this command reads; give another path")
        if place.exists() and not force and not ours:
            raise UserError(f"{option} {path} exists and was not written by adlm; give another path, or add --force")
        with tempfile.TemporaryFile(dir=place.parent):
            pass  # the folder can be written
        if len(os.fsencode(place.name)) + len(PART) + 12 > os.pathconf(place.parent, "PC_NAME_MAX"):
            raise UserError(f"{option} {path}: the file name is too long; give a shorter one")


def _is(given: Path, place: Path) -> bool:
    return given.exists() and place.samefile(given)


def _holds(given: Path, place: Path) -> bool:
    return given.resolve() in place.resolve().parents


def _holds_samples(place: Path) -> bool:
    if not place.exists():
        return False
    with place.open("rb") as file:
        return file.read(64).startswith(SAMPLES_MARK)


def written_by_adlm(path: Path) -> bool:
    """Whether a file says that it holds results of adlm; an empty one may be replaced too."""
    with path.open("rb") as file:
        content = file.read(2**24)
    if not content or b"".join(content[:64].split()).startswith(JSON_MARK):
        return True
    return any(content.startswith(start) and mark in content for start, mark in MARKS)


@contextmanager
def writing(path: Path, problem: str = "") -> Iterator[None]:
    """Operating system errors inside become user errors: which file, and why."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) and "null byte" not in str(error):
            raise
        raise UserError(f"{problem or f'{path} cannot be written'}: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """Why the operating system refused, in one phrase."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.strerror}; make room, then run the same command again"
    return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file, or leave what is there."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file to; after the block it is on the disk and takes the place of `path` in one move.

    Through a link, the file that the link leads to is replaced.
    """
    with writing(path):
        place = path.resolve()
        if place.exists() and not place.is_file():
            raise UserError(f"{path} is not a regular file; give another path")
        part = _part_of(place)
        remove_parts(place.parent, place.name)
        with part.open("xb") as held:
            _lock(held.fileno())
            try:
                yield part
                _sync(part)
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)
        _sync(place.parent)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; after the block it takes the place of `folder`, whatever was there. Checks nothing."""
    with writing(folder):
        place = folder.absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        part = _part_of(place)
        remove_parts(place.parent, place.name)
        part.mkdir()
        held = os.open(part, os.O_RDONLY)
        try:
            _lock(held)
            yield part
            for path in (*part.rglob("*"), part):
                _sync(path)
            move_folder(part, place)
            _sync(place.parent)
        finally:
            os.close(held)
            shutil.rmtree(part, ignore_errors=True)


def move_folder(new: Path, place: Path) -> None:
    """Put a folder in its place in one move. What was there is then called as the new one was, or is gone."""
    if place.exists() and not _exchange(new, place):
        aside = _part_of(place, "old")
        place.rename(aside)
        try:
            new.rename(place)
        except OSError:
            aside.rename(place)
            raise
        aside.rename(new)
    elif not place.exists():
        new.rename(place)


def remove_folder(folder: Path) -> None:
    """Delete a folder. If this is interrupted, the next write to the same place deletes what is left of it."""
    remove_parts(folder.parent, folder.name)
    part = _part_of(folder, "old")
    folder.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def remove_parts(folder: Path, name: str = "*") -> None:
    """Delete what killed processes left of files and folders of this name (all names: `*`) in a folder."""
    pattern = (
        name if name == "*" else "".join(f"[{character}]" if character in "*?[" else character for character in name)
    )
    for part in folder.glob(f".{pattern}.*{PART}"):
        with suppress(OSError):  # another process writes it, has just finished, or it may not be deleted
            held = os.open(part, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            finally:
                os.close(held)


def _part_of(place: Path, kind: str = "new") -> Path:
    return place.with_name(f".{place.name}.{kind}{os.getpid()}{PART}")


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks: a leftover then stays
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders in one move (Linux); False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file to read from; a pipe or a device would be waited for without end. Failures are user errors."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from None
    except ValueError as error:
        if isinstance(error, UserError) or "null byte" not in str(error):
            raise
        raise UserError(f"{path} cannot be read: {error}") from None


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UserError(f"{path} has {size:,} bytes, more than the {limit:,} that are read")
        return file.read()


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file; a user error where it is none."""
    content = read_bytes(path, limit)
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """json.loads, with one kind of error: ValueError, also where the text is nested too deeply or not UTF-8."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
