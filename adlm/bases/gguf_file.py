"""GGUF files: metadata, and weights by name. Independent of networks and tokenizers.

The header is parsed here and not by the package `gguf`, whose reader takes 4 s for the vocabulary of SmolLM2 and trusts
every count in the file: one of 100 bytes can fill the memory. The package only dequantizes.
"""

import importlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import opened

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER = 2**26  # bytes; a vocabulary of 256,000 symbols with its merges has 12 MB
MAX_DIMENSIONS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """Where the weights of a tensor are in the file."""

    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has the reverse order."""
    kind: int
    """The number of the quantization."""
    offset: int
    """In bytes, after the beginning of all weights."""


class _Header:
    """Reads values from the beginning of a file; what reaches past its end, or is too long, is damaged."""

    def __init__(self, content: mmap.mmap):
        self.content, self.offset = content, 0

    def take(self, num_bytes: int) -> int:
        """The offset of the next `num_bytes`, which are skipped."""
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > min(len(self.content), MAX_HEADER):
            raise ValueError("its header is cut off or too long")
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.content, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self.content[start : start + length].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item == STRING:
                self.take(8 * count)  # the least that `count` strings take
                self.offset -= 8 * count
                return [self.string() for _ in range(count)]
            size = struct.calcsize(self.code(item))
            return list(struct.unpack_from(f"<{count}{self.code(item)}", self.content, self.take(size * count)))
        return self.scalar(self.code(kind))

    @staticmethod
    def code(kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return SCALARS[kind]


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    start: int
    """Offset of the weights in the file."""

    def weights(self, name: str) -> NDArray[np.float32]:
        """The weights of a tensor in float32, dequantized; check its shape first."""
        tensor, kinds = self.tensors[name], _gguf()
        try:
            kind = kinds.GGMLQuantizationType(tensor.kind)
            num_weights, num_bytes = kinds.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UserError(
                f"{self.path}: tensor {name} has quantization {tensor.kind}, which the installed package gguf does not "
                "know; try pip install -U gguf, or another file of the model"
            ) from None
        rows, (columns, rest) = tensor.shape[:-1], divmod(tensor.shape[-1], num_weights)
        begin, size = self.start + tensor.offset, math.prod(rows) * columns * num_bytes
        if rest or begin + size > len(self._bytes):
            raise UserError(f"{self.path} is damaged or cut off: tensor {name} reaches past its end; download it again")
        try:
            weights = kinds.dequantize(self._bytes[begin : begin + size].reshape(*rows, columns * num_bytes), kind)
        except NotImplementedError:
            raise UserError(
                f"{self.path}: tensor {name} has quantization {kind.name}, which the package gguf cannot undo; give "
                "another file of the model, such as one of Q8_0, Q4_1 or F16"
            ) from None
        return np.require(weights, np.float32, ["C_CONTIGUOUS", "WRITEABLE"]).reshape(tensor.shape)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, mode="r", dtype=np.uint8).view(np.ndarray)  # slices of a memmap are slower


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file; a user error if it is not one, or damaged."""
    with opened(path) as file:
        stat = os.fstat(file.fileno())
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)  # options, tokenizer and weights are read from the same file, one after the other
def _read_header(path: Path, size: int, changed: int) -> GgufFile:
    with opened(path) as file, _damage(path):
        if file.read(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = _Header(content)
            header.take(4)
            if (version := header.scalar("I")) not in VERSIONS:
                raise ValueError(f"it has version {version}, and {' and '.join(map(str, VERSIONS))} are supported")
            num_tensors, num_values = header.scalar("Q"), header.scalar("Q")
            metadata, tensors = {}, {}
            for _ in range(num_values):
                name = header.string()
                metadata[name] = header.value(header.scalar("I"))
            for _ in range(num_tensors):
                name, dimensions = header.string(), header.scalar("I")
                if not 1 <= dimensions <= MAX_DIMENSIONS:
                    raise ValueError(f"tensor {name[:60]!r} has {dimensions} dimensions")
                shape = tuple(header.scalar("Q") for _ in range(dimensions))[::-1]
                tensors[name] = StoredTensor(shape, header.scalar("I"), header.scalar("Q"))
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
                raise ValueError(f"general.alignment is {alignment!r:.60}")
            return GgufFile(path, metadata, tensors, -(-header.offset // alignment) * alignment)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, struct.error) as error:
        problem = "it has text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UserError(f"{path} cannot be read as GGUF: {problem}; download it again") from None


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise UserError("a .gguf file needs the package gguf, which is not installed; try pip install gguf") from None
