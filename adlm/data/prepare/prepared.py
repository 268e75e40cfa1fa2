"""A prepared folder: the shards of every split, their tokenizer, and a manifest; opened, and written or replaced.

manifest.json   tokenizer.json special_tokens_map.json   train/tokens-00000.bin documents.bin [answers.bin labels.bin]
valid/...

`prepare` works in OUT.preparing, with a journal, and an atomic move replaces OUT. Only files that `prepare` wrote are
ever replaced or deleted. A line of the journal is appended after everything it describes is synced to disk.
"""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.prepare.shards import (
    ANSWERS,
    LABELS,
    SPLITS,
    Extent,
    ShardWriter,
    Tokens,
    check_files,
    file_sizes,
    prepare_again,
    reaches,
)
from adlm.data.rows.packing import LAYOUTS, PAIRS, Rows, rows_of
from adlm.data.sources.text_files import user_path
from adlm.errors import UserError
from adlm.files import (
    PART,
    Journal,
    move_folder,
    parse_json,
    read_bytes,
    refuse_taken,
    remove_folder,
    remove_parts,
    reporting_os_errors,
    write_file,
)
from adlm.tokens import Tokenizer, load_tokenizer

MANIFEST = "manifest.json"
FORMAT = 1
TOKENIZER = ("tokenizer.json", "special_tokens_map.json")
JOURNAL = "journal.jsonl"
NOTES = (JOURNAL, "recipe.json", "lock")  # recipe.json and lock: of earlier versions


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, open for reading."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    @property
    def has_answers(self) -> bool:
        """Whether the documents are conversations, with the answers marked."""
        return marks_of(self.manifest["recipe"]) == ANSWERS

    @property
    def labels(self) -> str:
        """The rule `data.labels` by which tokens are labelled, or none."""
        return str(self.manifest["recipe"].get("labels", "none"))

    def tokens(self, split: str) -> Tokens:
        if split not in self.manifest["splits"]:
            raise UserError(f"{self.folder} has no split {split!r}; it has {', '.join(self.splits)}")
        entry = self.manifest["splits"][split]
        return Tokens(
            self.folder / split, np.dtype(self.manifest["recipe"]["dtype"]), Extent(entry["tokens"], entry["documents"])
        )

    def rows(self, split: str, length: int | None = None, packing: str | None = None, overlap: bool = False) -> Rows:
        """The rows of a split; length and packing default to those in the manifest. Pairs have one packing only."""
        packing = PAIRS if self.has_answers else packing or self.manifest["packing"]
        return rows_of(
            self.tokens(split), self.tokenizer.vocabulary, length or self.manifest["length"], packing, overlap
        )


def open_prepared(folder: Path, sums: bool = True) -> Prepared:
    """Open a prepared folder after checking the size of every file, and with `sums` the checksums too."""
    manifest = read_manifest(folder)
    for split, entry in manifest["splits"].items():
        check_files(folder / split, entry["files"], sums)
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    if any(manifest["recipe"].get(key) != value for key, value in tokenizer_recipe(tokenizer).items()):
        raise UserError(f"{folder / 'tokenizer.json'} is not the one that made the ids; {prepare_again(folder)}")
    return Prepared(folder, manifest, tokenizer)


def weighted_folders(option: str) -> dict[Path, float]:
    """The folders of `data.prepared` and their weights: one folder, or several as `wiki=3,code=1`."""
    whole = user_path("data.prepared", option)
    if "=" not in option or whole.is_dir():
        return {whole: 1.0}
    found: dict[Path, float] = {}
    for part in option.split(","):
        name, equals, weight = part.strip().rpartition("=")
        folder = user_path("data.prepared", name)
        if not equals or not re.fullmatch(r"\d+\.?\d*|\.\d+", weight) or float(weight) == 0:
            raise UserError(
                f"data.prepared {part.strip()!r} has no weight above 0, such as 3 or 0.5; write "
                "FOLDER=WEIGHT,FOLDER=WEIGHT"
            )
        if folder in found:
            raise UserError(f"data.prepared names {name} twice; give it once, with the sum of the weights")
        found[folder] = float(weight)
    return found


def tokenizer_recipe(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of a recipe that identify a tokenizer."""
    return {
        "tokenizer": hashlib.sha256(tokenizer.engine.to_str().encode()).hexdigest(),
        "vocabulary": asdict(tokenizer.vocabulary),
    }


def marks_of(recipe: Mapping[str, Any]) -> str:
    """The file with a byte for each id in the splits of a recipe, or nothing."""
    return ANSWERS if "chat_template" in recipe else LABELS if "labels" in recipe else ""


def is_prepared(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The validated manifest of a prepared folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}, so it is not a prepared folder; make one with `adlm prepare`")
    try:
        manifest = parse_json(read_bytes(path))
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{path} is of format {manifest['format']}, and this version reads {FORMAT}; {prepare_again(folder)}"
            )
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {prepare_again(folder)}") from None
    return dict(manifest)


def _check_manifest(manifest: Any) -> None:
    """Check the type of every entry, and that the file sizes match the counts of tokens and documents."""
    dtype, marks = manifest["recipe"]["dtype"], marks_of(manifest["recipe"])
    checks = {
        "source": isinstance(manifest["source"], str),
        "length": isinstance(manifest["length"], int) and manifest["length"] > 0,
        "packing": manifest["packing"] in LAYOUTS and (manifest["packing"] == PAIRS) == (marks == ANSWERS),
        "dtype": dtype in ("uint16", "uint32"),
        "splits": bool(manifest["splits"]) and set(manifest["splits"]) <= {*SPLITS},
    }
    for split, entry in manifest["splits"].items():
        extent = Extent(entry["tokens"], entry["documents"])
        checks[f"counts of {split}"] = all(isinstance(count, int) and count >= 0 for count in asdict(extent).values())
        if all(checks.values()):
            sizes = {file["name"]: file["bytes"] for file in entry["files"] if file["sha256"]}
            checks[f"files of {split}"] = sizes == file_sizes(np.dtype(dtype), extent, marks)
    if failed := [name for name, passed in checks.items() if not passed]:
        raise ValueError(f"wrong {failed[0]}")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1))


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
def opened_journal(work: Path, out: Path, recipe: dict[str, Any]) -> Iterator[tuple[Journal, JournalEntry]]:
    """The journal of the working folder, locked, and the entry to resume from.

    Errors in the block become user errors; a folder without progress is deleted.
    """
    with reporting_os_errors(out):
        work.mkdir(parents=True, exist_ok=True)
    previous = recipe

    def resumes(header: Any) -> bool:
        nonlocal previous
        found = header.get("recipe") if isinstance(header, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("parts"), list):
            raise UserError(
                f"{work} is unfinished work of another version of adlm, or damaged; delete it, and run the same "
                "command again"
            )
        previous = found
        return True

    busy = f"{out} is being prepared by another process; wait for it, or stop it"
    with closing(Journal(work / JOURNAL, busy, {"recipe": recipe}, resumes)) as journal:
        try:
            remove_parts(out.parent, out.name)
            remove_parts(work)
            yield journal, _resume(journal, work, previous, recipe)
        except (UserError, OSError) as error:
            has_progress = not journal.is_empty
            if not has_progress:
                with suppress(OSError):
                    remove_folder(work)
            progress = f"; what is done is kept in {work.name}" if has_progress else ""
            resume = f"{progress}: run the same command again to resume" if progress else ""
            if isinstance(error, UserError):
                raise UserError(f"{error}{progress}") from None
            if error.errno == errno.ENOSPC:
                raise UserError(f"there is no space left to write {out}{resume}") from None
            raise UserError(f"{out} cannot be written: {error.strerror or error}{resume}") from None


def _resume(journal: Journal, work: Path, previous: dict[str, Any], recipe: dict[str, Any]) -> JournalEntry:
    """The last entry that matches the recipe and whose data is on disk; the journal is cut off after it.

    Of a source with other parts than before, the entries within the same first parts match. Splits that have no data at
    that entry are deleted.
    """
    pairs = zip(previous["parts"], recipe["parts"], strict=False)
    same_parts = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    counted_from_end = recipe["held_out"]["last_from"] is not None
    same_rest = {**previous, "parts": []} == {**recipe, "parts": []} and (previous == recipe or not counted_from_end)
    entries, dtype = [JournalEntry()], np.dtype(recipe["dtype"])
    for content in journal.entries():
        entry = _parse_entry(content)
        if entry is None or not same_rest or (entry.part, entry.pieces) > (same_parts, 0):
            break
        marks = marks_of(recipe)
        if not all(reaches(work / split, dtype, extent, marks) for split, extent in entry.splits.items()):
            break
        entries.append(entry)
    for split in SPLITS:
        if split not in entries[-1].splits:
            shutil.rmtree(work / split, ignore_errors=True)
    if previous == recipe:
        journal.append()
    else:
        journal.restart({"recipe": recipe}, *map(asdict, entries[1:]))
    return entries[-1]


def _parse_entry(content: Any) -> JournalEntry | None:
    """None if it is damaged."""
    try:
        splits = {split: Extent(**extent) for split, extent in content["splits"].items()}
        entry = JournalEntry(**{**content, "splits": splits})
    except (TypeError, KeyError, AttributeError):
        return None
    counts = (entry.part, entry.pieces, entry.documents, *(n for each in splits.values() for n in astuple(each)))
    valid = all(type(count) is int and count >= 0 for count in counts) and set(splits) <= {*SPLITS}
    return entry if valid else None


def append_entry(journal: Journal, entry: JournalEntry, writers: Iterable[ShardWriter]) -> None:
    """Sync the shards to disk, then append the entry to the journal."""
    for writer in writers:
        writer.sync()
    journal.append(asdict(entry))


def resolve_output(out: Path) -> Path:
    """The absolute path of `out` with links resolved, checked to be one that a folder can be moved to."""
    try:
        path = out.expanduser().resolve()
        if path.is_mount():
            raise UserError(
                f"{out} is a mount point, and no folder can be moved there; give a folder in it: {out}/data"
            )
        if not is_prepared(path):
            refuse_taken(path)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return path


def work_folder(out: Path) -> Path:
    """The working folder, in which the output is written before it is moved to `out`."""
    return out.with_name(f"{out.name}.preparing")


def check_work_folder(work: Path) -> None:
    """Refuse a working folder that exists and was not left behind by a run of `prepare`."""
    try:
        names = {path.name for path in work.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{work} cannot be used to work in: {error.strerror or error}; move it away") from None
    expected = {*NOTES, *SPLITS, *TOKENIZER, MANIFEST}
    unexpected = sorted(name for name in names - expected if not name.startswith("."))
    if unexpected or (names and not names & {*NOTES, MANIFEST}):
        raise UserError(
            f"{work} is not what a run of `adlm prepare` left behind (it holds {(unexpected or sorted(names))[0]}), "
            "but is needed as the working folder; move it away, or give another --out"
        )


def check_replaceable(out: Path, manifest: dict[str, Any], source: str) -> None:
    """Refuse to replace a prepared folder of another source, or one that contains files `prepare` did not write."""
    if manifest["source"] != source:
        raise UserError(
            f"{out} was prepared from {manifest['source']}, and this is {source}; give another --out, or delete it"
        )
    listed = {out / name for name in (MANIFEST, *TOKENIZER, *NOTES, *manifest["splits"])}
    listed |= {out / split / file["name"] for split, entry in manifest["splits"].items() for file in entry["files"]}
    unlisted = sorted(path for path in out.rglob("*") if path not in listed and not path.name.endswith(PART))
    if unlisted:
        raise UserError(
            f"{out} would be prepared anew, and it holds {unlisted[0].relative_to(out)}, which `adlm prepare` did not "
            "write; move that away, or give another --out"
        )


def publish(work: Path, out: Path) -> None:
    """Move the completed working folder to `out` atomically, and delete the folder it replaces."""
    move_folder(work, out)
    if work.exists():  # the replaced folder, which the move exchanged with the new one
        remove_folder(work)
    remove_leftovers(out, work)


def remove_leftovers(out: Path, work: Path) -> None:
    """Delete files that are not needed once `out` exists, including those left by a killed process."""
    for name in NOTES:
        with suppress(OSError):  # a read-only folder is used as it is
            (out / name).unlink(missing_ok=True)
    remove_parts(out)
    remove_parts(out.parent, out.name)
    remove_parts(work.parent, work.name)
    if is_prepared(work) and not any((work / name).exists() for name in NOTES):  # the folder that `out` replaced
        remove_folder(work)
