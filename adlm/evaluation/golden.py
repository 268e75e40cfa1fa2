"""A folder of numbers that the released code gave, of any sizes. Knows the files, nothing of what they should equal.

Everything taken from it is remembered, so that what nobody asked for can be named.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.config.schema import Vocabulary
from adlm.errors import UserError


class Golden:
    """golden.json, the .npz arrays and the .ckpt weights of one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self._taken: set[str] = set()
        path = folder / "golden.json"
        try:
            self._json = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; give a folder with a golden.json") from None
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}") from None
        if not isinstance(self._json, dict):
            raise UserError(f"{path} must hold sections such as meta and adlm_losses")

    def vocabulary(self) -> Vocabulary:
        meta = self.section("meta")
        try:
            return Vocabulary(int(meta["vocab_size_with_mask"]), int(meta["mask_index"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.folder / 'golden.json'}: meta gives no usable vocabulary: {error}") from None

    def section(self, name: str) -> dict[str, Any]:
        found = self._json.get(name, {})
        if not isinstance(found, dict):
            raise UserError(f"{self.folder / 'golden.json'}: {name} must be a mapping")
        return found

    def transitions(self) -> list[dict[str, Any]]:
        return list(self._json.get("transitions", []))

    def number(self, section: str, key: str) -> Any:
        """An entry of golden.json, taken."""
        self._taken.add(f"{section} {key}")
        return self._json[section][key]

    def has(self, *files: str) -> bool:
        return all((self.folder / file).is_file() for file in files)

    def array(self, file: str, key: str) -> Tensor:
        """One array of a .npz, taken."""
        if file not in self._arrays:
            try:
                with np.load(self.folder / file, allow_pickle=False) as content:
                    self._arrays[file] = dict(content)
            except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
                raise UserError(f"{self.folder / file} cannot be read as arrays: {error}") from None
        if key not in self._arrays[file]:
            raise UserError(f"{self.folder / file} has no array {key!r}; it has {', '.join(self._arrays[file])}")
        self._taken.add(f"{file} {key}")
        return torch.from_numpy(self._arrays[file][key])

    def keys(self, file: str) -> list[str]:
        """The arrays of a .npz."""
        with np.load(self.folder / file, allow_pickle=False) as content:
            return list(content.files)

    def checkpoint(self, file: str) -> Path:
        """The path of a .ckpt, taken."""
        self._taken.add(file)
        return self.folder / file

    def untaken(self) -> list[str]:
        """What the folder holds and nobody asked for, a file or an entry each; transitions by the sampler's name."""
        left = []
        names = {entry["key"]: f"{entry['name']} at {entry['t']}" for entry in self.transitions()}
        for path in sorted(self.folder.iterdir()):
            if path.suffix == ".ckpt" and path.name not in self._taken:
                left.append(path.name)
            if path.suffix == ".npz":
                keys = [key for key in self.keys(path.name) if f"{path.name} {key}" not in self._taken]
                left += [f"{path.name}: {names.get(key, key)}" for key in keys if key not in ("x0", "xt", "t")]
        for section in ("adlm_losses", "baseline_losses"):
            left += [
                f"golden.json: {section} {key}"
                for key in self.section(section)
                if f"{section} {key}" not in self._taken
            ]
        return left
