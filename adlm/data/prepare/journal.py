"""The journal of a run of `prepare`, from which an interrupted run resumes. Independent of text and token ids.

A line is appended after everything it describes is synced to disk. Data after the last complete line is discarded.
"""

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.prepare.shards import SPLITS, Extent, ShardWriter, reaches
from adlm.errors import UserError
from adlm.files import append_synced, lock_file, parse_json, read_bytes, remove_folder, reporting_os_errors, write_file

RECIPE, JOURNAL, LOCK = "recipe.json", "journal.jsonl", "lock"


@dataclass(frozen=True)
class JournalEntry:
    """A position between two chunks of the source, and the extent of each split written up to it."""

    part: int = 0
    pieces: int = 0
    """Number of chunks of that part before the position."""
    documents: int = 0
    """Number of documents that end before the position, over all parts."""
    splits: Mapping[str, Extent] = field(default_factory=dict)


@contextmanager
def locked(work: Path, out: Path) -> Iterator[None]:
    """Lock the working folder exclusively. Errors become user errors; a folder without progress is deleted."""
    with reporting_os_errors(out):
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / LOCK).open("w")
    with lock:
        lock_file(lock, f"{out} is being prepared by another process; wait for it, or stop it")
        try:
            yield
        except (UserError, OSError) as error:
            has_progress = bool(read_journal(work))
            if not has_progress:
                with suppress(OSError):
                    remove_folder(work)
            progress = f"; what is done is kept in {work.name}" if has_progress else ""
            raise UserError(_error_message(error, out, progress)) from None


def _error_message(error: UserError | OSError, out: Path, progress: str) -> str:
    if isinstance(error, UserError):
        return f"{error}{progress}"
    resume = f"{progress}: run the same command again to resume" if progress else ""
    if error.errno == errno.ENOSPC:
        return f"there is no space left to write {out}{resume}"
    return f"{out} cannot be written: {error.strerror or error}{resume}"


def read_journal(work: Path) -> list[JournalEntry]:
    """The entries of the journal, up to the first incomplete or damaged line."""
    entries: list[JournalEntry] = []
    if not (work / JOURNAL).exists():
        return entries
    for line in read_bytes(work / JOURNAL).splitlines():
        try:
            fields = parse_json(line)
            splits = {split: Extent(**extent) for split, extent in fields.pop("splits").items()}
            entry = JournalEntry(**fields, splits=splits)
        except (ValueError, TypeError, KeyError, AttributeError):
            break
        counts = (entry.part, entry.pieces, entry.documents, *(n for each in splits.values() for n in astuple(each)))
        if not all(type(count) is int and count >= 0 for count in counts) or not set(splits) <= {*SPLITS}:
            break
        entries.append(entry)
    return entries


def resume_entry(work: Path, recipe: dict[str, Any]) -> JournalEntry:
    """The entry to resume from: the last one that matches the recipe and whose data is on disk.

    Deletes splits that have no data at that entry, and truncates the journal after it.
    """
    before = {}
    with suppress(ValueError):  # missing or incomplete
        before = parse_json(read_bytes(work / RECIPE))
    if not isinstance(before, dict) or not isinstance(before.get("parts"), list):
        before = {}
    same_parts = _num_common(before.get("parts", []), recipe["parts"])
    undivided = recipe["held_out"]["last_from"] is not None
    same_rest = {**before, "parts": []} == {**recipe, "parts": []} and (before == recipe or not undivided)
    dtype = np.dtype(recipe["dtype"])
    entries = [JournalEntry()]
    for entry in read_journal(work) if same_rest else []:
        in_same_parts = entry.part < same_parts or (entry.part == same_parts and entry.pieces == 0)
        if in_same_parts and all(reaches(work / split, dtype, extent) for split, extent in entry.splits.items()):
            entries.append(entry)
    start = entries[-1]
    for split in SPLITS:
        if split not in start.splits:
            shutil.rmtree(work / split, ignore_errors=True)
    # the journal first: with the new recipe, old entries would look valid for parts that have changed
    write_file(work / JOURNAL, "".join(_format_entry(entry) for entry in entries[1:]))
    write_file(work / RECIPE, json.dumps(recipe))
    return start


def _num_common(before: list[Any], now: list[Any]) -> int:
    """The length of the common prefix of two lists."""
    same = 0
    while same < min(len(before), len(now)) and before[same] == now[same]:
        same += 1
    return same


def _format_entry(entry: JournalEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def append_entry(work: Path, entry: JournalEntry, writers: Iterable[ShardWriter]) -> None:
    """Sync the shards to disk, then append the entry to the journal."""
    for writer in writers:
        writer.sync()
    with (work / JOURNAL).open("ab", buffering=0) as journal:
        append_synced(journal, _format_entry(entry).encode())
