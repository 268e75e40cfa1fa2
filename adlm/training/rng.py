"""Where a run's chance comes from: every draw belongs to (seed, what it is for, step). Knows nothing of what is drawn.

Nothing is carried from one step to the next, so a run that is resumed draws what an unbroken one draws. Rows are told
apart by `Portion`: what is drawn for a step is drawn for its whole batch, on any number of processes.
"""

import hashlib
from typing import Literal

import torch

Purpose = Literal["weights", "order", "noise", "dropout", "validation", "samples"]

ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbours lie far apart, and no two steps coincide


def seed_of(seed: int, purpose: Purpose, number: int = 0) -> int:
    """A seed for the draws of one step; those of one purpose differ in their lower 32 bits, all that a CPU looks at."""
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + number * ODD) % 2**63


def generator_of(seed: int, purpose: Purpose, number: int = 0) -> torch.Generator:
    """On the CPU, so that every device sees the same draws."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, number))


def reseed_dropout(seed: int, step: int, rank: int, num_ranks: int) -> None:
    """Dropout draws from torch's default generators; each process has masks of its own."""
    torch.manual_seed(seed_of(seed, "dropout", step * num_ranks + rank))
