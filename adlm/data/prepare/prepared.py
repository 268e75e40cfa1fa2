"""Opens and validates a prepared folder: the shards of every split, their tokenizer, and a manifest.

manifest.json   tokenizer.json special_tokens_map.json   train/tokens-00000.bin documents.bin   valid/...
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.prepare.shards import SPLITS, Extent, Tokens, check_files, file_sizes, prepare_again
from adlm.data.rows.packing import LAYOUTS, Rows, rows_of
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, write_file
from adlm.tokens import Tokenizer, load_tokenizer

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, open for reading."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    def tokens(self, split: str) -> Tokens:
        if split not in self.manifest["splits"]:
            raise UserError(f"{self.folder} has no split {split!r}; it has {', '.join(self.splits)}")
        entry = self.manifest["splits"][split]
        return Tokens(
            self.folder / split, np.dtype(self.manifest["recipe"]["dtype"]), Extent(entry["tokens"], entry["documents"])
        )

    def rows(self, split: str, length: int | None = None, packing: str | None = None, overlap: bool = False) -> Rows:
        """The rows of a split; length and packing default to those in the manifest."""
        return rows_of(
            self.tokens(split),
            self.tokenizer.vocabulary,
            length or self.manifest["length"],
            packing or self.manifest["packing"],
            overlap,
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


def tokenizer_recipe(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of a recipe that identify a tokenizer."""
    return {
        "tokenizer": hashlib.sha256(tokenizer.engine.to_str().encode()).hexdigest(),
        "vocabulary": asdict(tokenizer.vocabulary),
    }


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
    dtype = manifest["recipe"]["dtype"]
    checks = {
        "source": isinstance(manifest["source"], str),
        "length": isinstance(manifest["length"], int) and manifest["length"] > 0,
        "packing": manifest["packing"] in LAYOUTS,
        "dtype": dtype in ("uint16", "uint32"),
        "splits": bool(manifest["splits"]) and set(manifest["splits"]) <= {*SPLITS},
    }
    for split, entry in manifest["splits"].items():
        extent = Extent(entry["tokens"], entry["documents"])
        checks[f"counts of {split}"] = all(isinstance(count, int) and count >= 0 for count in asdict(extent).values())
        if all(checks.values()):
            sizes = {file["name"]: file["bytes"] for file in entry["files"] if file["sha256"]}
            checks[f"files of {split}"] = sizes == file_sizes(np.dtype(dtype), extent)
    if failed := [name for name, passed in checks.items() if not passed]:
        raise ValueError(f"wrong {failed[0]}")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1))
