"""Safetensors files: ours have the bytes of the library's writer. In several files: any division into rows reads what
any other has written, and files that do not fit are refused.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from adlm.checkpoints.tensor_files import (
    METADATA,
    OFFSETS,
    TYPES,
    TensorRows,
    file_order,
    read_rows,
    write_rows,
    write_tensors,
)

WHOLE = {"matrix": torch.arange(14.0).view(7, 2), "vector": torch.arange(3.0), "number": torch.tensor(5.0)}


def tensors_of_each_type() -> dict[str, torch.Tensor]:
    shapes = {"matrix": (3, 5), "none": (0, 4), "number": ()}
    return {f"{kind}.{name}": torch.ones(shape, dtype=kind) for kind in TYPES for name, shape in shapes.items()}


@pytest.mark.parametrize("metadata", [None, {"title": 'a "quoted" é'}])
@pytest.mark.parametrize("tensors", [WHOLE, tensors_of_each_type(), {}, {"turned": WHOLE["matrix"].T}])
def test_the_bytes_are_those_of_the_librarys_writer(tensors, metadata, tmp_path):
    write_tensors(tensors, tmp_path / "ours", metadata)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata or {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_are_gathered_one_by_one_in_the_order_of_the_file(tmp_path):
    asked = []

    def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return tensor + 1

    tensors = {**WHOLE, "bytes": torch.zeros(2, dtype=torch.uint8), "double": torch.zeros(2, dtype=torch.float64)}
    write_tensors(tensors, tmp_path / "file", dtype=torch.float32, full_tensor=full_tensor)
    assert [id(tensor) for tensor in asked] == [id(tensors[name]) for name in file_order(tensors)]
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], (tensor + 1).float()) for name, tensor in tensors.items())


def divided(num: int) -> list[dict[str, TensorRows]]:
    """What each of `num` processes holds, as torch.chunk divides rows; the first has what cannot be divided."""
    parts: list[dict[str, TensorRows]] = [{} for _ in range(num)]
    for name, tensor in WHOLE.items():
        first = 0
        for part, chunk in zip(parts, tensor.chunk(num) if tensor.ndim else [tensor], strict=False):
            part[name] = TensorRows(chunk, first, tensor.shape)
            first += len(chunk) if tensor.ndim else 0
    return parts


def write(folder: Path, num: int) -> list[Path]:
    paths = [folder / f"{number}.safetensors" for number in range(num)]
    for path, part in zip(paths, divided(num), strict=True):
        write_rows(part, path)
    return paths


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_any_division_reads_what_any_other_has_written(before, after, tmp_path):
    paths = write(tmp_path, before)
    for part in divided(after):
        empty = {name: TensorRows(torch.zeros_like(rows.tensor), rows.first, rows.shape) for name, rows in part.items()}
        read_rows(reversed(paths), empty)
        assert all(torch.equal(empty[name].tensor, part[name].tensor) for name in part)


def test_equal_rows_give_equal_bytes(tmp_path):
    contents = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        contents.append([path.read_bytes() for path in write(tmp_path / str(number), 2)])
    assert contents[1:] == contents[:-1]


@pytest.mark.filterwarnings("ignore")
def test_torch_reads_the_files(tmp_path):
    write(tmp_path, 3)
    read = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(read[name], WHOLE[name]) for name in WHOLE)


def test_files_that_do_not_fit_are_refused(tmp_path):
    first, second, third = write(tmp_path, 3)
    wide, square = WHOLE["matrix"], torch.zeros(7, 7)
    for paths, shape, error in [
        ([first, third], wide, "matrix lacks rows"),
        ([second, third], wide, "matrix lacks rows"),
        ([first, second], wide, r"matrix has shape \(6, 2\) instead of \(7, 2\)"),
        ([first, first, second, third], wide, "or has some twice"),
        ([first, second, third], square, r"matrix has shape \(7, 2\) instead of \(7, 7\)"),
        ([first, second, third], torch.tensor(0.0), r"matrix has shape \(7, 2\) instead of \(\)"),
        ([], wide, "matrix is missing"),
        ([tmp_path / "none"], wide, "none"),
    ]:
        with pytest.raises(ValueError, match=error):
            read_rows(paths, {"matrix": TensorRows(torch.zeros_like(shape), 0, shape.shape)})


@pytest.mark.parametrize("metadata", ["[1]", "{", "[" * 10**5, '{"x": 1}', '{"matrix": []}', '{"matrix": {"a": 1}}'])
def test_hostile_offsets_are_refused(metadata, tmp_path):
    path = tmp_path / "a.safetensors"
    for content in (metadata, json.dumps({"matrix": {OFFSETS: ["x"]}}), json.dumps({"matrix": {OFFSETS: [0.5]}})):
        save_file({"matrix": WHOLE["matrix"]}, path, {METADATA: content})
        with pytest.raises(ValueError):  # noqa: PT011
            read_rows([path], {"matrix": TensorRows(torch.zeros(7, 2), 0, torch.Size([7, 2]))})
