"""GGUF files: metadata, and weights by name. Independent of networks and tokenizers.

The header is parsed here and not by the package `gguf`, whose reader takes 4 s for the vocabulary of SmolLM2 and trusts
every count in the file: one of 100 bytes can fill the memory. The common quantizations are undone here too, in a
quarter of the package's time; it is needed for the others only.
"""

import importlib
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator
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


def _halves(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bytes (N, 2 n) as n numbers of half precision."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(N, 2 n) from bytes (N, n): all lower halves, then all upper ones."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


@dataclass(frozen=True)
class Quantization:
    """Blocks of `num_weights` weights in `num_bytes` bytes."""

    num_weights: int
    num_bytes: int
    undo: Callable[[NDArray[np.uint8]], NDArray[Any]]
    """Blocks (N, num_bytes) -> weights (N, num_weights)."""


QUANTIZATIONS = {
    0: Quantization(1, 4, lambda blocks: np.ascontiguousarray(blocks).view("<f4")),  # F32
    1: Quantization(1, 2, _halves),  # F16
    2: Quantization(32, 18, lambda blocks: _halves(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - np.float32(8))),  # Q4_0
    3: Quantization(  # Q4_1: scale, minimum, 32 numbers of 4 bits
        32, 20, lambda blocks: _halves(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _halves(blocks[:, 2:4])
    ),
    8: Quantization(  # Q8_0: scale, 32 numbers of 8 bits
        32, 34, lambda blocks: _halves(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    ),
}
"""By their numbers in the file."""


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
        quantization, place = self.find(name)
        weights = quantization.undo(self._bytes[place].reshape(-1, quantization.num_bytes))
        return np.require(weights, np.float32, ["C_CONTIGUOUS", "WRITEABLE"]).reshape(self.tensors[name].shape)

    def find(self, name: str) -> tuple[Quantization, slice]:
        """How the weights of a tensor are quantized, and which bytes they are; a user error if the file ends before."""
        tensor = self.tensors[name]
        quantization = QUANTIZATIONS.get(tensor.kind) or self._other_quantization(name, tensor.kind)
        columns, rest = divmod(tensor.shape[-1], quantization.num_weights)
        begin, size = self.start + tensor.offset, math.prod(tensor.shape[:-1]) * columns * quantization.num_bytes
        if rest or begin + size > len(self._bytes):
            raise UserError(f"{self.path} is damaged or cut off: tensor {name} reaches past its end; download it again")
        return quantization, slice(begin, begin + size)

    def _other_quantization(self, name: str, number: int) -> Quantization:
        """One that only the package gguf knows."""
        gguf = _gguf()
        try:
            kind = gguf.GGMLQuantizationType(number)
            num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UserError(
                f"{self.path}: tensor {name} has quantization {number}, which the installed package gguf does not "
                "know; try pip install -U gguf, or another file of the model"
            ) from None

        def undo(blocks: NDArray[np.uint8]) -> NDArray[Any]:
            try:
                weights: NDArray[Any] = gguf.dequantize(blocks, kind)
            except NotImplementedError:
                raise UserError(
                    f"{self.path}: tensor {name} has quantization {kind.name}, which the package gguf cannot undo; "
                    "give another file of the model, such as one of Q8_0, Q4_1 or F16"
                ) from None
            return weights

        return Quantization(num_weights, num_bytes, undo)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, mode="r", dtype=np.uint8).view(np.ndarray)  # slices of a memmap are slower


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file; a user error if it is not one, or damaged."""
    with opened(path) as file:
        status = os.fstat(file.fileno())
    return _read_header(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1)  # description, tokenizer and weights are read one after the other: 0.5 s each for SmolLM2
def _read_header(path: Path, _state: tuple[int, ...]) -> GgufFile:
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
        raise UserError(
            "a .gguf file of this quantization needs the package gguf, which is not installed; try pip install gguf"
        ) from None
