"""Arrays computed in parts: divided among processes, cached on disk, resumed after an interruption. No metrics.

judged/nats-3f0c.../about.json   the inputs of the computation; its sha256 is in the folder's name
judged/nats-3f0c.../00000.npz    arrays of the first TEXTS_PER_PART texts
"""

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adlm import distributed
from adlm.errors import UserError
from adlm.files import opened, replacing, reporting_os_errors, write_file

TEXTS_PER_PART = 64  # texts in a cached file; an interruption loses at most this many

DAMAGED = (ValueError, TypeError, AttributeError, EOFError, struct.error, zlib.error, zipfile.BadZipFile)
"""What numpy raises for a file that is not whole."""

Arrays = dict[str, NDArray[Any]]
Item = TypeVar("Item")


def json_sha256(content: Any) -> str:
    """sha256 of texts, ids or settings."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def compute_in_parts(
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], Arrays],
    fits: Callable[[Sequence[Item], Arrays], bool],
    kind: str,
    about: Mapping[str, Any],
    folder: Path | None,
    report_done: Callable[[int], None],
) -> list[Arrays]:
    """compute(items), TEXTS_PER_PART items at a time; parts of the same inputs that the folder has are read instead.

    Each part is computed by one process, so that results do not depend on their number. `fits` checks that cached
    arrays have the form that `compute` returns. `report_done` is called with the approximate number of items done.
    """
    digest, (rank, ranks) = json_sha256(about), distributed.rank_and_size()
    cache = None if folder is None else folder / f"{kind}-{digest[:24]}"
    if cache is not None:
        with reporting_os_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
        if not (cache / "about.json").is_file():
            write_file(cache / "about.json", json.dumps(about, indent=1))
    done: dict[int, Arrays] = {}
    for number in range(rank, -(-len(items) // TEXTS_PER_PART), ranks):
        path = None if cache is None else cache / f"{number:05}.npz"
        part = items[number * TEXTS_PER_PART : (number + 1) * TEXTS_PER_PART]
        done[number] = _read_or_compute(path, part, compute, fits)
        report_done(min(len(items), (number + ranks) * TEXTS_PER_PART))
    gathered = distributed.gather([(digest, done)])
    if any(other_digest != digest for other_digest, _ in gathered):
        raise UserError("the processes read different texts; wait until the files are written, and run this again")
    parts = {number: arrays for _, done_by_rank in gathered for number, arrays in done_by_rank.items()}
    return [parts[number] for number in sorted(parts)]


def _read_or_compute(
    path: Path | None,
    part: Sequence[Item],
    compute: Callable[[Sequence[Item]], Arrays],
    fits: Callable[[Sequence[Item], Arrays], bool],
) -> Arrays:
    """The arrays of the part: from the file at `path` if it exists, else computed, and written to it."""
    if path is not None and path.exists():
        arrays: Arrays = {}
        with suppress(*DAMAGED), opened(path) as file, np.load(file, allow_pickle=False) as found:
            arrays = dict(found)
        if not arrays or not fits(part, arrays):
            raise UserError(f"{path} is damaged; delete it, and it is made again")
        return arrays
    arrays = compute(part)
    if path is not None:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    return arrays
