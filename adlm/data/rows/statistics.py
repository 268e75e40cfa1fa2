"""Statistics of rows: document lengths, token frequencies, anchors. Prints nothing.

Shapes: B rows, L tokens, V symbols. `pad` is True at padding.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.rows.anchor_rules import AnchorRule, SymbolStatistics
from adlm.data.rows.packing import Rows
from adlm.tokens import Tokenizer

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
    """Fraction of tokens that are anchors."""
    padding: float
    """Fraction of positions that are padding."""


def statistics_of(rows: Rows, rule: AnchorRule, top: int = 12) -> Statistics:
    x, pad = rows.read(_sample(rows))
    text = np.ones_like(x, bool) if pad is None else ~pad
    ids, counts = np.unique(x[text], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:top]
    extent = rows.tokens.extent
    lengths = np.diff(np.asarray(rows.tokens.ends, np.int64), prepend=0)
    quantiles = np.quantile(lengths, QUANTILES, method="nearest") if len(lengths) else ()
    return Statistics(
        num_rows=len(rows),
        num_documents=extent.documents,
        num_tokens=extent.tokens,
        document_lengths=tuple(int(value) for value in quantiles),
        sampled_tokens=int(text.sum()),
        distinct=len(ids),
        most_frequent=tuple((int(ids[i]), float(counts[i] / counts.sum())) for i in order),
        anchors=float(anchors_in(x, pad, rule)[text].mean()),
        padding=float(1 - text.mean()),
    )


def _sample(rows: Rows) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))


def anchors_in(x: NDArray[np.int64], pad: NDArray[np.bool_] | None, rule: AnchorRule) -> NDArray[np.bool_]:
    """(n, L), True at anchors, False at padding. Processes 32 rows at a time: rules may need (rows, V) numbers."""
    padding = np.zeros_like(x, bool) if pad is None else pad
    masks = [
        rule(torch.from_numpy(x[i : i + 32]), torch.from_numpy(padding[i : i + 32])).numpy()
        for i in range(0, len(x), 32)
    ]
    return np.concatenate(masks)


def count_symbols(batches: Iterable[tuple[Tensor, Tensor | None]], num_symbols: int) -> tuple[Tensor, Tensor, int]:
    """How often each symbol occurs (V,), in how many rows (V,), and the number of rows, of batches x (B, L) and pad."""
    counts, rows, num_rows = torch.zeros(num_symbols), torch.zeros(num_symbols), 0
    for x, pad in batches:
        row_and_symbol = x + num_symbols * torch.arange(len(x))[:, None]
        found, times = row_and_symbol[... if pad is None else ~pad].unique(return_counts=True)  # type: ignore[no-untyped-call]
        counts += torch.bincount(found % num_symbols, times, num_symbols)
        rows += torch.bincount(found % num_symbols, minlength=num_symbols)
        num_rows += len(x)
    return counts, rows, num_rows


def symbol_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of every symbol, with the space before it."""
    return [tokenizer.piece(index).decode(errors="replace") for index in range(tokenizer.vocabulary.size)]


def symbol_statistics(rows: Rows, tokenizer: Tokenizer) -> SymbolStatistics:
    """Counted in evenly spaced rows."""
    x, pad = rows.read(_sample(rows))
    batch = torch.from_numpy(x), None if pad is None else torch.from_numpy(pad)
    return SymbolStatistics(symbol_texts(tokenizer), *count_symbols([batch], tokenizer.vocabulary.size))
