"""What tells one network's weights from any other's. Knows no files."""

import hashlib

import torch
from torch import nn


def weights_sha256(network: nn.Module) -> str:
    """sha256 of every weight, by name."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
