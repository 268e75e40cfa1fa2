"""The token ids of one split on disk: shards of equal size, and document ends. Independent of text and rows.

A split is one array of ids: its documents concatenated, each followed by eos if the vocabulary has one. It is stored in
files of SHARD ids regardless of document boundaries, so id n is in file n // SHARD. `documents.bin` holds the index
after the last id of each document (uint64). If the documents are conversations, `answers.bin` has a byte for each id: 1
if the assistant writes it, else 0. If the tokens are labelled (`data.labels`), `labels.bin` has a byte for each id: 1
if it is labelled, else 0. A split has at most one of the two.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import file_sha256

SHARD = 2**26  # ids per file: 128 MB at two bytes each
ENDS, ANSWERS, LABELS = "documents.bin", "answers.bin", "labels.bin"
SPLITS = ("train", "valid", "test")
Ids = NDArray[np.unsignedinteger[Any]]
Ends = NDArray[np.uint64]


def shard_name(number: int) -> str:
    return f"tokens-{number:05}.bin"


def dtype_for(num_symbols: int, wanted: str) -> np.dtype[Any]:
    """The data type of stored ids: the requested one, or for "auto" the smaller of uint16 and uint32 that fits."""
    name = ("uint16" if num_symbols <= 2**16 else "uint32") if wanted == "auto" else wanted
    dtype = np.dtype(name)
    if num_symbols - 1 > np.iinfo(dtype).max:
        raise UserError(
            f"data.dtype {name} holds ids up to {np.iinfo(dtype).max:,}, and the tokenizer has {num_symbols:,} symbols"
            "; try data.dtype=auto"
        )
    return dtype


@dataclass(frozen=True)
class Extent:
    """The numbers of tokens and documents in a split."""

    tokens: int = 0
    documents: int = 0


class ShardWriter:
    """Appends documents to a split. Data beyond `extent`, left by an interrupted run, is truncated first."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], extent: Extent, shard: int | None = None):
        self.folder, self.dtype, self.shard = folder, dtype, shard or SHARD
        self.tokens, self.documents = extent.tokens, extent.documents
        self.unsynced: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        full, rest = divmod(extent.tokens, self.shard)
        _truncate(folder / shard_name(full), rest * dtype.itemsize)
        _truncate(folder / ENDS, extent.documents * 8)
        for marks in (ANSWERS, LABELS):
            if (folder / marks).exists():
                _truncate(folder / marks, extent.tokens)
        number = full + 1
        while (beyond := folder / shard_name(number)).exists():
            beyond.unlink()
            number += 1

    @property
    def extent(self) -> Extent:
        return Extent(self.tokens, self.documents)

    def append(self, ids: Ids, ends: Sequence[int], marks: str = "", is_marked: Sequence[bool] = ()) -> None:
        """Append ids; `ends` are the positions in `ids` at which documents end.

        `marks` is the file of a byte for each id, ANSWERS or LABELS, and `is_marked` what is written to it; the same
        file every time, or none.
        """
        if marks:
            self._write(marks, np.array(is_marked, np.bool_).tobytes())
        self._write(ENDS, (np.asarray(ends, dtype=np.uint64) + np.uint64(self.tokens)).tobytes())
        self.documents += len(ends)
        ids = ids.astype(self.dtype, copy=False)
        while len(ids):
            number, filled = divmod(self.tokens, self.shard)
            part = ids[: self.shard - filled]
            self._write(shard_name(number), part.tobytes())
            self.tokens += len(part)
            ids = ids[len(part) :]

    def sync(self) -> None:
        """Flush everything appended so far to disk (fsync)."""
        for path in self.unsynced:
            with path.open("ab") as file:
                os.fsync(file.fileno())
        self.unsynced.clear()

    def _write(self, name: str, data: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(data)
        self.unsynced.add(self.folder / name)


def _truncate(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def file_sizes(dtype: np.dtype[Any], extent: Extent, marks: str) -> dict[str, int]:
    """The non-empty files of a split, with their sizes in bytes; `marks` is the file of a byte for each id, if any."""
    full, rest = divmod(extent.tokens, SHARD)
    sizes = {shard_name(number): SHARD * dtype.itemsize for number in range(full)}
    sizes |= {shard_name(full): rest * dtype.itemsize, ENDS: extent.documents * 8}
    sizes |= {marks: extent.tokens} if marks else {}
    return {name: size for name, size in sizes.items() if size}


def reaches(folder: Path, dtype: np.dtype[Any], extent: Extent, marks: str) -> bool:
    """Whether the files of a split contain at least `extent`."""
    return all(
        size <= ((folder / name).stat().st_size if (folder / name).exists() else 0)
        for name, size in file_sizes(dtype, extent, marks).items()
    )


def list_files(folder: Path) -> list[dict[str, Any]]:
    """The non-empty files of a split, with their sizes and checksums."""
    paths = [path for path in sorted(folder.glob("*.bin")) if path.stat().st_size]
    with ThreadPoolExecutor() as threads:
        return [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(paths, threads.map(file_sha256, paths), strict=True)
        ]


def remove_empty(folder: Path, splits: Sequence[str]) -> None:
    """Delete the folders of splits that are not in `splits`, and empty files."""
    for split in SPLITS:
        if split not in splits:
            shutil.rmtree(folder / split, ignore_errors=True)
        for path in (folder / split).glob("*.bin"):
            if not path.stat().st_size:
                path.unlink()


def prepare_again(folder: Path) -> str:
    """The remedy for a damaged prepared folder."""
    return f"delete the folder {folder} and prepare the data again"


def check_files(folder: Path, files: Sequence[dict[str, Any]], sums: bool) -> None:
    """Check that every file exists with its size, and with `sums` its checksum."""
    for file in files:
        path = folder / file["name"]
        if not path.is_file():
            raise UserError(f"{path} is missing; {prepare_again(folder.parent)}")
        if path.stat().st_size != file["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes and had {file['bytes']:,}; {prepare_again(folder.parent)}"
            )
    if sums:
        with ThreadPoolExecutor() as threads:
            digests = threads.map(file_sha256, [folder / file["name"] for file in files])
        for file, digest in zip(files, digests, strict=True):
            if digest != file["sha256"]:
                raise UserError(
                    f"{folder / file['name']} is not what was written (its checksum differs); "
                    f"{prepare_again(folder.parent)}"
                )


class Tokens:
    """The token ids of a split, memory-mapped."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], extent: Extent, shard: int | None = None):
        self.folder, self.dtype, self.extent, self.shard = folder, dtype, extent, shard or SHARD
        self._files: dict[int, Ids] = {}
        ends = folder / ENDS
        self.ends: Ends = np.memmap(ends, np.uint64, "r") if extent.documents else np.zeros(0, np.uint64)
        self.is_answer, self.is_labelled = (
            np.memmap(folder / marks, np.bool_, "r") if (folder / marks).exists() else None
            for marks in (ANSWERS, LABELS)
        )
        """For each id whether the assistant writes it, and whether it is labelled; None where the split has no such
        file."""

    def __len__(self) -> int:
        return self.extent.tokens

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_files": {},
            "ends": None,
            "is_answer": None,
            "is_labelled": None,
        }  # memory maps are reopened after unpickling

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["dtype"], state["extent"], state["shard"])  # type: ignore[misc]

    def copy_to(self, row: NDArray[np.int64], start: int, stop: int) -> None:
        """Copy the ids from start to stop to the beginning of `row`."""
        at = start
        while at < stop:
            number, offset = divmod(at, self.shard)
            ids = self._file(number)[offset : offset + stop - at]
            if not len(ids):
                raise UserError(f"{self.folder / shard_name(number)} is truncated; {prepare_again(self.folder.parent)}")
            row[at - start : at - start + len(ids)] = ids
            at += len(ids)

    def document(self, number: int) -> tuple[int, int]:
        """The index of a document's first id, and the index after its last."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def _file(self, number: int) -> Ids:
        if number not in self._files:
            path = self.folder / shard_name(number)
            try:
                self._files[number] = np.memmap(path, self.dtype, "r")
            except OSError as error:
                raise UserError(
                    f"{path} cannot be read: {error.strerror}; {prepare_again(self.folder.parent)}"
                ) from None
        return self._files[number]


class TokensInMemory(Tokens):
    """A split held in memory instead of on disk."""

    def __init__(self, documents: Sequence[Sequence[int]], name: str):
        ids = np.array([index for document in documents for index in document], np.uint32)
        self.folder, self.dtype, self.shard = Path(name), ids.dtype, max(1, len(ids))
        self.extent, self._files = Extent(len(ids), len(documents)), {0: ids}
        self.ends = np.cumsum([len(document) for document in documents], dtype=np.uint64)
        self.is_answer = self.is_labelled = None
