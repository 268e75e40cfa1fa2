"""Statistics of a prepared split: document lengths, token frequencies, anchors. Prints nothing."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.rows.packing import Rows
from adlm.diffusion.anchors import anchor_mask

SAMPLE = 1000  # evenly spaced rows in which frequencies and anchors are counted
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Statistics:
    num_rows: int
    num_documents: int
    num_tokens: int
    document_lengths: tuple[int, ...]
    """Quantiles of the number of tokens per document: minimum, 10%, median, 90%, maximum."""
    sampled_tokens: int
    """Number of tokens in the sampled rows, to which the following fields refer."""
    distinct: int
    """Number of different ids."""
    most_frequent: tuple[tuple[int, float], ...]
    """The most frequent ids with their relative frequencies."""
    anchors: float
    """Fraction of tokens that are anchors: their id occurs at most tau times in its row."""
    padding: float
    """Fraction of positions that are padding."""


def statistics_of(rows: Rows, tau: int, top: int = 12) -> Statistics:
    sample = np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))
    x, pad = rows.read(sample)
    text = np.ones_like(x, bool) if pad is None else ~pad
    ids, counts = np.unique(x[text], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:top]
    extent = rows.tokens.extent
    return Statistics(
        num_rows=len(rows),
        num_documents=extent.documents,
        num_tokens=extent.tokens,
        document_lengths=_length_quantiles(rows.tokens.ends),
        sampled_tokens=int(text.sum()),
        distinct=len(ids),
        most_frequent=tuple((int(ids[i]), float(counts[i] / counts.sum())) for i in order),
        anchors=float(anchors_in(x, pad, tau, rows.vocabulary.size)[text].mean()),
        padding=float(1 - text.mean()),
    )


def anchors_in(x: NDArray[np.int64], pad: NDArray[np.bool_] | None, tau: int, num_symbols: int) -> NDArray[np.bool_]:
    """(n, L), True at anchors, False at padding. Processes 32 rows at a time, since the counts are (rows, V)."""
    padding = np.zeros_like(x, bool) if pad is None else pad
    masks = [
        anchor_mask(torch.from_numpy(x[i : i + 32]), tau, num_symbols, torch.from_numpy(padding[i : i + 32])).numpy()
        for i in range(0, len(x), 32)
    ]
    return np.concatenate(masks)


def _length_quantiles(ends: NDArray[np.uint64]) -> tuple[int, ...]:
    if not len(ends):
        return ()
    lengths = np.diff(np.asarray(ends, np.int64), prepend=0)
    return tuple(int(value) for value in np.quantile(lengths, QUANTILES, method="nearest"))
