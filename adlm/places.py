"""Where things are written: a place must be free, and a file appears whole or not at all. Knows no formats."""

import os
from pathlib import Path

from adlm.errors import UserError


def refuse_taken(folder: Path) -> None:
    """Nothing of the user's is ever written over: the place must be free, or an empty folder."""
    try:
        taken = folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from None
    if taken:
        raise UserError(f"{folder} exists already; give another place, or move it away")


def check_place(path: Path | None, knob: str = "--out") -> None:
    """What would fail after hours, when the file is written, fails now."""
    if path is None:
        return
    place = path.absolute()
    try:
        if not place.parent.is_dir() or not place.name:
            raise UserError(f"{knob} {path}: there is no folder {place.parent}")
        if place.exists() and not place.is_file():
            raise UserError(f"{knob} {path} is no file; give another place")
        beside = place.with_name(f".{place.name}.try.{os.getpid()}")
        beside.touch()
        beside.unlink()
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{knob} {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there in one move; through a link, where the link leads."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file that could be written; give another place")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
