"""Safetensors files: writing one tensor by tensor, and tensors in several files, each with some rows of them.

Independent of processes and of training. The layout of several files is that of torch's HuggingFaceStorageWriter with
`save_distributed`, and its HuggingFaceStorageReader reads it: the metadata of a file say at which row of the whole
tensor its rows begin. docs/decisions.md says why torch's writer itself is not used.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adlm.files import parse_json

METADATA, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names
TYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16"}
TYPES |= {torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
ALIGNMENT = 8  # of the first tensor, in bytes

FullTensor = Callable[[Tensor], Tensor]
"""Returns the full tensor on the CPU; of a sharded one, gathered as by `DTensor.full_tensor`."""


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of a safetensors file: by type, as in TYPES, then by name."""
    types = list(TYPES)
    return sorted(tensors, key=lambda name: (types.index(tensors[name].dtype), name))


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    full_tensor: FullTensor = on_cpu,
) -> None:
    """Write a safetensors file tensor by tensor, in the order of `file_order`; OSError if that is not possible.

    Its bytes are those of `safetensors.torch.save_file`, which needs all tensors in memory. With `dtype`, tensors of
    one dtype are converted to another. A dtype outside TYPES is not supported.
    """
    names, end = file_order(tensors), 0
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    for name in names:
        tensor, kind = tensors[name], dtype or tensors[name].dtype
        start, end = end, end + tensor.numel() * kind.itemsize
        header[name] = {"dtype": TYPES[kind], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_content(full_tensor(tensors[name]).to(dtype or tensors[name].dtype)))


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor. No variable of the caller keeps it in memory while the next one is gathered."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorRows:
    """Consecutive rows of a tensor, those that one process holds; of a tensor without dimensions, the tensor."""

    tensor: Tensor
    first: int
    """The row of the whole tensor with which these begin."""
    shape: torch.Size
    """Of the whole tensor."""


def write_rows(rows: Mapping[str, TensorRows], path: Path) -> None:
    """Write a file; OSError if that is not possible. Equal rows give equal bytes."""
    tensors = {name: part.tensor for name, part in rows.items()}
    offsets = {
        name: {OFFSETS: [part.first, *[0] * (len(part.shape) - 1)][: len(part.shape)]} for name, part in rows.items()
    }
    write_tensors(tensors, path, {METADATA: json.dumps(offsets)})


@torch.no_grad()
def read_rows(paths: Iterable[Path], rows: Mapping[str, TensorRows]) -> None:
    """Copy saved rows into the tensors, and read no others. ValueError if the files do not fit them.

    Files without offsets hold whole tensors.
    """
    with ExitStack() as files:
        try:
            saved: dict[str, list[tuple[int, Any]]] = defaultdict(list)
            for path in paths:
                file = files.enter_context(safe_open(path, "pt"))
                offsets = parse_json((file.metadata() or {}).get(METADATA, "{}"))
                for name in file.keys():  # noqa: SIM118
                    first = offsets[name][OFFSETS] if offsets else []
                    saved[name].append((first[0] if first else 0, file.get_slice(name)))
            for name, part in rows.items():
                _read(name, sorted(saved[name], key=lambda piece: piece[0]), part)
        except (SafetensorError, OSError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None  # AttributeError: a dtype that torch lacks


def _read(name: str, pieces: list[tuple[int, Any]], part: TensorRows) -> None:
    """Copy the overlap of `part` with every piece: its first row, and its safetensors slice, in the order of rows."""
    if not pieces:
        raise ValueError(f"{name} is missing")
    ends = [first + (piece.get_shape() or [1])[0] for first, piece in pieces]
    if [first for first, _ in pieces] != [0, *ends[:-1]]:
        raise ValueError(f"{name} lacks rows, or has some twice")
    for _, piece in pieces:
        shape = (*ends[-1:], *piece.get_shape()[1:]) if piece.get_shape() else ()
        if shape != part.shape:
            raise ValueError(f"{name} has shape {shape} instead of {tuple(part.shape)}")
    if not part.shape:
        part.tensor.copy_(pieces[0][1][...])
        return
    start, stop = part.first, part.first + len(part.tensor)
    for (first, piece), end in zip(pieces, ends, strict=True):
        if (low := max(first, start)) < (high := min(end, stop)):
            part.tensor[low - start : high - start].copy_(piece[low - first : high - first])
