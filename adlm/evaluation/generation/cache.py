"""What takes long, in parts: shared among processes, kept on disk, gone on with after a cut. Knows no metric.

judged/nats-3f0c.../about.json   what it was made from: the name is its sha256
judged/nats-3f0c.../00000.npz    arrays of the first PART texts
"""

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adlm import distributed
from adlm.errors import UserError
from adlm.files import opened, replacing, write_file, writing

PART = 64  # texts: at most so many are computed in vain

Arrays = dict[str, NDArray[Any]]
Item = TypeVar("Item")


def request_sha256(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def texts_sha256(texts: Sequence[Any]) -> str:
    """sha256 of texts, or of lists of ids, in their order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def compute_in_parts(
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], Arrays],
    fits: Callable[[Sequence[Item], Arrays], bool],
    kind: str,
    about: Mapping[str, Any],
    folder: Path | None,
    tell: Callable[[int], None],
) -> list[Arrays]:
    """compute(items), PART at a time; what lies in the folder already, made from the same, is read instead.

    A part is one process's, so that their number changes nothing in it. `fits` says whether what was read can be what
    `compute` gives. `tell` is told about how many items are done.
    """
    made_from, (rank, ranks) = request_sha256(about), distributed.rank_and_size()
    place = None if folder is None else _place(folder / f"{kind}-{made_from[:24]}", about)
    done: dict[int, Arrays] = {}
    for number in range(rank, -(-len(items) // PART), ranks):
        path = None if place is None else place / f"{number:05}.npz"
        some = items[number * PART : (number + 1) * PART]
        if path is not None and path.exists():
            arrays = _read(path)
            if not fits(some, arrays):
                raise UserError(f"{path} is damaged; delete it, and it is made again")
        else:
            arrays = compute(some)
            if path is not None:
                _write(path, arrays)
        done[number] = arrays
        tell(min(len(items), (number + ranks) * PART))
    every = distributed.gather([(made_from, done)])
    if any(other != made_from for other, _ in every):
        raise UserError("the processes read different texts; wait until the files are written, and run this again")
    parts = {number: arrays for _, its in every for number, arrays in its.items()}
    return [parts[number] for number in sorted(parts)]


def _place(folder: Path, about: Mapping[str, Any]) -> Path:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "about.json").is_file():
        write_file(folder / "about.json", json.dumps(about, indent=1))
    return folder


def _write(path: Path, arrays: Arrays) -> None:
    with replacing(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _read(path: Path) -> Arrays:
    try:
        with opened(path) as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, TypeError, AttributeError, EOFError, struct.error, zlib.error, zipfile.BadZipFile):
        raise UserError(f"{path} is damaged; delete it, and it is made again") from None
