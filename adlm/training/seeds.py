"""Seeds of a run: every random number is derived from (seed, purpose, step). Independent of what is drawn.

No RNG state is carried from step to step, so a resumed run draws the same numbers as an uninterrupted one. Noise is
drawn for the global batch of a step; a `BatchSlice` selects the rows of a micro-batch, on any number of processes.
"""

import hashlib
from typing import Literal

import torch

Purpose = Literal["weights", "order", "noise", "dropout", "validation", "samples"]

STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: seeds of neighbouring steps are far apart, and all differ


def seed_of(seed: int, purpose: Purpose, number: int = 0) -> int:
    """The seed of one step. Seeds of one purpose differ in their lower 32 bits, all that torch's CPU generator uses."""
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + number * STRIDE) % 2**63


def generator_of(seed: int, purpose: Purpose, number: int = 0) -> torch.Generator:
    """A CPU generator, so that the numbers are the same for every device."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, number))


def reseed_dropout(seed: int, step: int, rank: int, num_ranks: int) -> None:
    """Seed torch's default generators, which dropout uses; each process has its own masks."""
    torch.manual_seed(seed_of(seed, "dropout", step * num_ranks + rank))
