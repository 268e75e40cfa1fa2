"""How far a run of `prepare` has got, so that one cut off goes on from there. Knows no text and no ids.

A line of the journal is written when everything before it is on the disk. What lies beyond the last whole line is as
good as never written.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.prepare.shards import SPLITS, Extent, ShardWriter, reaches
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, remove_folder, write_file

RECIPE, JOURNAL, LOCK = "recipe.json", "journal.jsonl", "lock"


@dataclass(frozen=True)
class JournalEntry:
    """A point between two pieces of the source, and what had been written there."""

    part: int = 0
    pieces: int = 0
    """Of that part, that lie before it."""
    documents: int = 0
    """Ended before it, over all parts."""
    splits: Mapping[str, Extent] = field(default_factory=dict)


@contextmanager
def locked(work: Path, out: Path) -> Iterator[None]:
    """Alone in the working folder; what goes wrong inside is told, and work worth keeping is kept."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / LOCK).open("w")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{out} is being prepared by another process; wait for it, or stop it") from None
        try:
            yield
        except (UserError, OSError) as error:
            kept = bool(read_journal(work))
            if not kept:
                with suppress(OSError):
                    remove_folder(work)
            raise UserError(_told(error, out, f"; what is done is kept in {work.name}" if kept else "")) from None


def _told(error: UserError | OSError, out: Path, kept: str) -> str:
    if isinstance(error, UserError):
        return f"{error}{kept}"
    again = f"{kept}: run the same command again to go on" if kept else ""
    if error.errno == errno.ENOSPC:
        return f"there is no space left to write {out}{again}"
    return f"{out} cannot be written: {error.strerror or error}{again}"


def read_journal(work: Path) -> list[JournalEntry]:
    """The places a run has got to, as far as their lines are whole."""
    places: list[JournalEntry] = []
    if not (work / JOURNAL).exists():
        return places
    for line in read_bytes(work / JOURNAL).splitlines():
        try:
            entry = parse_json(line)
            splits = {split: Extent(**extent) for split, extent in entry.pop("splits").items()}
            place = JournalEntry(**entry, splits=splits)
        except (ValueError, TypeError, KeyError, AttributeError):
            break
        counts = (place.part, place.pieces, place.documents, *(n for each in splits.values() for n in astuple(each)))
        if not all(type(count) is int and count >= 0 for count in counts) or not set(splits) <= {*SPLITS}:
            break
        places.append(place)
    return places


def resume_entry(work: Path, recipe: dict[str, Any]) -> JournalEntry:
    """Where to go on; the working folder is left with what belongs to that place, and a journal that ends there."""
    before = {}
    with suppress(ValueError):  # it is missing or torn
        before = parse_json(read_bytes(work / RECIPE))
    if not isinstance(before, dict) or not isinstance(before.get("parts"), list):
        before = {}
    same_parts = _common(before.get("parts", []), recipe["parts"])
    undivided = recipe["held_out"]["last_from"] is not None
    same_rest = {**before, "parts": []} == {**recipe, "parts": []} and (before == recipe or not undivided)
    dtype = np.dtype(recipe["dtype"])
    places = [JournalEntry()]
    for place in read_journal(work) if same_rest else []:
        fits = place.part < same_parts or (place.part == same_parts and place.pieces == 0)
        if fits and all(reaches(work / split, dtype, extent) for split, extent in place.splits.items()):
            places.append(place)
    start = places[-1]
    for split in SPLITS:
        if split not in start.splits:
            shutil.rmtree(work / split, ignore_errors=True)
    # the journal first: a new recipe beside an old journal would vouch for places in parts that have changed
    write_file(work / JOURNAL, "".join(_line(place) for place in places[1:]))
    write_file(work / RECIPE, json.dumps(recipe))
    return start


def _common(before: list[Any], now: list[Any]) -> int:
    """How many parts at the beginning are as they were."""
    same = 0
    while same < min(len(before), len(now)) and before[same] == now[same]:
        same += 1
    return same


def _line(place: JournalEntry) -> str:
    return json.dumps(asdict(place)) + "\n"


def append_entry(work: Path, place: JournalEntry, writers: Iterable[ShardWriter]) -> None:
    for writer in writers:
        writer.sync()
    with (work / JOURNAL).open("a", encoding="utf-8") as journal:
        journal.write(_line(place))
        journal.flush()
        os.fsync(journal.fileno())
