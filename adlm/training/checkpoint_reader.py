"""A reader of torch.distributed.checkpoint files that builds tensors and nothing else. Knows nothing of training.

torch unpickles the description of a snapshot (`.metadata`) as it comes, and any object that was saved beside the
tensors. Here the description may name only the records that describe tensors, and no object is ever read: a snapshot
that was tampered with cannot run code.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        named = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in ALLOWED or isinstance(named, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a description of tensors")


class TensorReader(FileSystemReader):
    """torch's reader of a folder, for tensors alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description; raises UnpicklingError where it is none."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Description(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no description of tensors")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is no tensor")
        return metadata
