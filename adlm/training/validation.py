"""The bound on held-out rows, with its standard error, shared among processes. Knows no method by name.

Rows and draws are the same every time, so two measurements of a run differ by the weights alone.
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.methods.method import Method
from adlm.training.data import TrainingData
from adlm.training.rng import generator_of
from adlm.training.sharding import Processes


@dataclass(frozen=True)
class ValidationResult:
    """Nats per token of the text, over `tokens` tokens of `rows` rows; the rows' bos and eos are paid, not counted."""

    nats: float
    stderr: float
    """Of the mean over rows, each with its draw, as if rows were independent: those of one document are not."""
    tokens: int
    rows: int


def validate(method: Method, network: Any, supply: TrainingData, size: int, processes: Processes) -> ValidationResult:
    """The mean bound a token over all held-out rows, `size` rows of each process at a time.

    Every process takes part in every round, because gathering weights is done together; one that has no rows left
    measures some again and does not count them.
    """
    seed, estimator = method.config.train.seed, ESTIMATORS[default_estimator(method)].of(method)
    nats, tokens, nats_squared, mixed, tokens_squared, rows = (torch.zeros((), dtype=torch.float64) for _ in range(6))
    pieces = supply.held_out(size)
    while some := list(islice(pieces, processes.num_ranks)):
        piece = some[min(processes.rank, len(some) - 1)]
        x = piece.x.to(processes.device)
        pad = None if piece.pad is None else piece.pad.to(processes.device)
        draws = generator_of(seed, "validation", piece.group)
        paid = estimator(network, x, pad, draws, piece.portion).double().sum(dim=1).cpu()
        if processes.rank >= len(some):
            continue
        counted = (piece.counted & method.predicted(piece.x, piece.pad)).sum(dim=1).double()
        nats += paid.sum()
        tokens += counted.sum()
        nats_squared += (paid * paid).sum()
        mixed += (paid * counted).sum()
        tokens_squared += (counted * counted).sum()
        rows += len(paid)
    sums = processes.sum([float(value) for value in (nats, tokens, nats_squared, mixed, tokens_squared, rows)])
    return _measured(*sums)


def _measured(
    nats: float, tokens: float, nats_squared: float, mixed: float, tokens_squared: float, rows: float
) -> ValidationResult:
    """The ratio of two sums and its standard error: of rows i, sum (nats_i - mean tokens_i)^2 / tokens^2."""
    mean = nats / tokens
    spread = max(0.0, nats_squared - 2 * mean * mixed + mean * mean * tokens_squared)
    correction = rows / (rows - 1) if rows > 1 else math.inf
    stderr = math.sqrt(spread * correction) / tokens if rows > 1 else math.inf
    return ValidationResult(mean, stderr, int(tokens), int(rows))
