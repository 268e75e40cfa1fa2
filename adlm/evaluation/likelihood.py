"""The bound on held-out rows, row by row, so that two models can be compared on the same draws. Knows no training.

Shapes: R rows of L ids; `pad` is True at padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bound = Callable[[Tensor, Tensor | None, int], Tensor]
"""(x (B, L), pad, seed) -> nats (B, L)."""


@dataclass(frozen=True)
class RowNats:
    """What each row costs, averaged over draws, and how many tokens it has."""

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """Nats a token and the standard error of the mean over rows (text and draws both vary)."""

    nats: float
    stderr: float


def row_nats(
    bound: Bound,
    batches: Sequence[tuple[Tensor, Tensor | None]],
    num_draws: int,
    tell: Callable[[], None] = lambda: None,
) -> RowNats:
    """Each row's bound, the mean of `num_draws` draws. Batch i's draw k has seed i * num_draws + k for any model."""
    nats, tokens = [], []
    for number, (x, pad) in enumerate(batches):
        draws = [bound(x, pad, number * num_draws + draw).double().sum(dim=1) for draw in range(num_draws)]
        nats.append(torch.stack(draws).mean(dim=0).numpy())
        tokens.append((torch.ones_like(x) if pad is None else (~pad).long()).sum(dim=1).numpy())
        tell()
    return RowNats(np.concatenate(nats), np.concatenate(tokens))


def estimate(rows: RowNats) -> Estimate:
    """sum nats / sum tokens: of a ratio, so each row's deviation is from what its tokens would cost on average."""
    mean = rows.nats.sum() / rows.tokens.sum()
    deviation = rows.nats - mean * rows.tokens
    num = len(rows.nats)
    stderr = float(np.sqrt((deviation**2).sum() * num / (num - 1)) / rows.tokens.sum()) if num > 1 else float("inf")
    return Estimate(float(mean), stderr)


def difference(ours: RowNats, theirs: RowNats) -> Estimate:
    """Ours minus theirs on the same rows and draws: most of the noise is common and goes away."""
    return estimate(RowNats(ours.nats - theirs.nats, ours.tokens))
