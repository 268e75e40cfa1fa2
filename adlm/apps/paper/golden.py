"""A folder of golden numbers: outputs of the released code, of any sizes. Reads the files; makes no comparisons.

It records which entries were read, so that unused ones can be reported.
"""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.config.schema import Vocabulary
from adlm.errors import UserError
from adlm.files import opened, read_json


class Golden:
    """golden.json, the .npz arrays and the .ckpt weights of one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self._used: set[str] = set()
        path = folder / "golden.json"
        try:
            self._json = read_json(path)
        except UserError as error:
            raise UserError(f"{error}; give a folder with a golden.json") from None
        if not isinstance(self._json, dict):
            raise UserError(f"{path} must hold sections such as meta and adlm_losses")

    def vocabulary(self) -> Vocabulary:
        meta = self.section("meta")
        try:
            return Vocabulary(int(meta["vocab_size_with_mask"]), int(meta["mask_index"]))
        except (KeyError, TypeError, OverflowError):
            raise UserError(
                f"{self.folder / 'golden.json'}: meta must give vocab_size_with_mask and mask_index as whole numbers"
            ) from None

    def section(self, name: str) -> dict[str, Any]:
        section = self._json.get(name, {})
        if not isinstance(section, dict):
            raise UserError(f"{self.folder / 'golden.json'}: {name} must be a mapping")
        return section

    def transitions(self) -> list[dict[str, Any]]:
        """The sampler steps in the folder, each with its key, name, t and dt."""
        entries = self._json.get("transitions", [])
        for entry in entries if isinstance(entries, list) else [None]:
            fields = entry if isinstance(entry, dict) else {}
            has_names = all(isinstance(fields.get(key), str) for key in ("key", "name"))
            has_times = all(isinstance(fields.get(key), (int, float)) for key in ("t", "dt"))
            if not has_names or not has_times or not isinstance(fields.get("eta", 0.0), (int, float)):
                raise UserError(f"{self.folder / 'golden.json'}: a transition must have key, name, t and dt")
        return list(entries)

    def number(self, section: str, key: str) -> Tensor:
        """A number or a list of numbers from golden.json; marks it as used."""
        self._used.add(f"{section} {key}")
        value = self._json[section][key]
        if not all(isinstance(number, (int, float)) for number in (value if isinstance(value, list) else [value])):
            raise UserError(f"{self.folder / 'golden.json'}: {section} {key} must be a number, not {value!r}")
        return torch.tensor(value, dtype=torch.float64)

    def has(self, *files: str) -> bool:
        return all((self.folder / file).is_file() for file in files)

    def array(self, file: str, key: str) -> Tensor:
        """One array of a .npz; marks it as used."""
        arrays = self._read(file)
        if key not in arrays:
            raise UserError(f"{self.folder / file} has no array {key!r}; it has {', '.join(arrays)}")
        self._used.add(f"{file} {key}")
        if arrays[key].dtype.kind not in "iufb":
            raise UserError(f"{self.folder / file}: array {key!r} is not made of numbers")
        return torch.from_numpy(arrays[key].astype(arrays[key].dtype.newbyteorder("=")))

    def ids(self, file: str, key: str) -> Tensor:
        """An array of token ids (B, L); marks it as used."""
        ids, size = self.array(file, key), self.vocabulary().size
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel() or ids.min() < 0 or ids.max() >= size:
            raise UserError(f"{self.folder / file}: {key!r} must be ids (rows, length) from 0 to {size - 1}")
        if key == "x0" and "xt" in self.keys(file) and self.array(file, "xt").shape != ids.shape:
            raise UserError(f"{self.folder / file}: 'x0' and 'xt' must have one shape")
        return ids.long()

    def times(self, file: str) -> Tensor:
        """The array `t` of a .npz, one time in (0, 1] for each row of `xt`; marks it as used."""
        t = self.array(file, "t")
        if t.shape != self.ids(file, "xt").shape[:1] or not ((t > 0) & (t <= 1)).all():
            raise UserError(f"{self.folder / file}: 't' must be one time in (0, 1] for each row of 'xt'")
        return t.float()

    def keys(self, file: str) -> list[str]:
        """The names of the arrays in a .npz."""
        return list(self._read(file))

    def _read(self, file: str) -> dict[str, np.ndarray[Any, Any]]:
        if file not in self._arrays:
            try:
                with opened(self.folder / file) as raw, np.load(raw, allow_pickle=False) as content:
                    self._arrays[file] = dict(content)
            except (ValueError, TypeError, EOFError, struct.error, zlib.error, zipfile.BadZipFile):
                raise UserError(
                    f"{self.folder / file} cannot be read as the arrays of a .npz; is it damaged?"
                ) from None
        return self._arrays[file]

    def checkpoint(self, file: str) -> Path:
        """The path of a .ckpt; marks it as used."""
        self._used.add(file)
        return self.folder / file

    def unused(self) -> list[str]:
        """The files and entries of the folder that were not read."""
        unused = []
        names = {entry["key"]: f"{entry['name']} at {entry['t']}" for entry in self.transitions()}
        for path in sorted(self.folder.glob("*.*")):
            if path.suffix == ".ckpt" and path.name not in self._used:
                unused.append(path.name)
            if path.suffix == ".npz" and path.is_file():
                keys = [key for key in self.keys(path.name) if f"{path.name} {key}" not in self._used]
                unused += [f"{path.name}: {names.get(key, key)}" for key in keys if key not in ("x0", "xt", "t")]
        if not self.has("adlm_transitions.npz"):
            unused += [f"adlm_transitions.npz (missing): {name}" for name in names.values()]
        for section in ("adlm_losses", "baseline_losses"):
            keys = [key for key in self.section(section) if f"{section} {key}" not in self._used]
            unused += [f"golden.json {section}: {key}" for key in keys]
        return unused
