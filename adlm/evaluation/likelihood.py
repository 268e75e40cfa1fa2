"""What a text costs, in nats, and how sure that is: two errors, of the draws and of the documents. Knows no training.

Rows are taken in groups. A group's draws belong to (seed, replicate, group), its times stratified over its rows; so
neither the size of a batch nor the number of processes changes what is drawn, and every model sees the same.

Shapes: R rows of L ids in G groups, K replicates, D documents; `pad` is True at padding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.times import Portion
from adlm.errors import UserError
from adlm.methods.method import Method

TOKENS_A_GROUP = 2**16  # 64 rows of 1024: at most this many are read at once, so that a batch never spans two groups

Estimator = Callable[[Any, Tensor, Tensor | None, torch.Generator, Portion], Tensor]
"""(network, x (B, L), pad, generator, portion) -> nats (B, L) whose expectation is the bound."""


class TextRows(Protocol):
    """Rows of one length, and which document each of their tokens is of."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """ids (n, L) and pad (n, L), or no pad where there is none."""
        ...

    def documents(self, rows: Any) -> NDArray[np.int64]:
        """(n, L), the number of each token's document."""
        ...


@dataclass(frozen=True)
class GroupNats:
    """What one group of rows costs."""

    group: int
    documents: list[int]
    """The documents that the group has tokens of."""
    nats: list[list[float]]
    """(documents, K), of each of them by replicate."""
    tokens: list[int]
    """Of each of them, those that are predicted."""


@dataclass(frozen=True)
class Nats:
    """What a text costs, kept apart as the errors need it."""

    groups: NDArray[np.float64]
    """(G, K), of each group and replicate."""
    documents: NDArray[np.float64]
    """(D, K), of each document and replicate."""
    tokens: NDArray[np.int64]
    """(D,), the document's tokens that are predicted."""
    exact: bool
    """Whether nothing is drawn, so that replicates are all alike."""


@dataclass(frozen=True)
class Estimate:
    """Nats a token with two standard errors."""

    nats: float
    monte_carlo: float | None
    """Of the draws, by what replicates differ in; None where there is only one."""
    over_documents: float | None
    """Of the choice of documents; what the draws add is taken out where there are replicates to tell it by.

    None where there are fewer than two documents, or where the draws vary so much that nothing is left of it.
    """
    freedom: float
    """Degrees of freedom of the first."""
    tokens: int
    documents: int

    @property
    def stderr(self) -> float:
        """Of both together; NaN where neither is known."""
        known = [error for error in (self.over_documents, self.monte_carlo) if error is not None]
        return math.hypot(*known) if known else math.nan

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        """e^nats; infinite where no number is so large."""
        return math.exp(self.nats) if self.nats < 700 else math.inf

    def interval(self) -> tuple[float, float] | None:
        """Of 95% confidence for the bound on this very text, in nats a token."""
        if self.monte_carlo is None:
            return None
        reach = 0.0 if self.monte_carlo == 0 else quantile(self.freedom) * self.monte_carlo
        return self.nats - reach, self.nats + reach


def measure_groups(
    method: Method,
    network: Any,
    rows: TextRows,
    numbers: NDArray[np.int64],
    estimator: Estimator,
    samples: int,
    seed: int,
    batch: int,
    groups: Iterator[int],
) -> Iterator[GroupNats]:
    """What each of these groups of the rows `numbers` costs, `batch` rows at a time."""
    size, device = group_size(rows.length), next(network.parameters()).device
    for group in groups:
        members = numbers[group * size : (group + 1) * size]
        by_token, documents = [], []
        for start in range(0, len(members), batch):
            some = members[start : start + batch]
            read, padding = rows.read(some)
            x, pad = torch.from_numpy(read), None if padding is None else torch.from_numpy(padding)
            there, there_pad = x.to(device), None if pad is None else pad.to(device)
            predicted = method.predicted(x, pad).numpy()
            drawn = [
                estimator(network, there, there_pad, _generator(seed, replicate, group), Portion(start, len(members)))
                for replicate in range(samples)
            ]
            by_token.append(torch.stack(drawn).double().cpu().numpy()[:, predicted])
            documents.append(rows.documents(some)[predicted])
        nats = np.concatenate(by_token, axis=1)
        if not np.isfinite(nats).all():
            raise UserError(
                "the model's nats are not finite: its weights are damaged, or its logits are too large for their "
                "precision; measure another model"
            )
        yield _summed(group, nats, np.concatenate(documents))


def group_size(length: int) -> int:
    """Rows in a group."""
    return max(1, TOKENS_A_GROUP // length)


def num_groups(num_rows: int, length: int) -> int:
    return -(-num_rows // group_size(length))


def nats_of(groups: list[GroupNats], exact: bool) -> Nats:
    """All groups of a text, put together; a document may lie in several."""
    ordered = sorted(groups, key=lambda group: group.group)
    ordered = [group for group in ordered if group.documents]  # left to right a row of one token predicts none
    if not ordered:
        raise UserError("no token is predicted: from left to right the first of a row is given; give a longer text")
    each = [np.asarray(group.nats, np.float64) for group in ordered]
    documents = np.concatenate([np.asarray(group.documents, np.int64) for group in ordered])
    numbers, index = np.unique(documents, return_inverse=True)
    nats = np.zeros((len(numbers), each[0].shape[1]))
    np.add.at(nats, index, np.concatenate(each))
    tokens = np.bincount(index, np.concatenate([group.tokens for group in ordered])).astype(np.int64)
    return Nats(np.array([part.sum(axis=0) for part in each]), nats, tokens, exact)


def estimate(nats: Nats) -> Estimate:
    """sum nats / sum tokens and its errors."""
    total = int(nats.tokens.sum())
    mean = float(nats.groups.mean(axis=1).sum() / total)
    monte_carlo, freedom = _monte_carlo(nats.groups / total, nats.exact)
    return Estimate(mean, monte_carlo, _over_documents(_deviations(nats)), freedom, total, len(nats.tokens))


def difference(ours: Nats, theirs: Nats) -> Estimate:
    """Ours minus theirs, a token, on the same rows and draws: most of the noise is common and goes away."""
    if ours.groups.shape[0] != theirs.groups.shape[0] or len(ours.tokens) != len(theirs.tokens):
        raise UserError("the two were measured on different rows; measure both in one call")
    first, second = estimate(ours), estimate(theirs)
    apart = ours.groups / ours.tokens.sum() - theirs.groups / theirs.tokens.sum()  # one of them may have one replicate
    monte_carlo, freedom = _monte_carlo(apart, ours.exact and theirs.exact)
    return Estimate(
        first.nats - second.nats,
        monte_carlo,
        _over_documents(_deviations(ours) - _deviations(theirs)),
        freedom,
        first.tokens,
        first.documents,
    )


def quantile(freedom: float) -> float:
    """The 97.5% point of Student's t, within 1%: by Cornish and Fisher's expansion, from known points below 3."""
    if freedom < 3:
        return float(np.exp(np.interp(freedom, (1, 2, 3), np.log((12.706, 4.303, 3.182)))))
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _monte_carlo(groups: NDArray[np.float64], exact: bool) -> tuple[float | None, float]:
    """The standard error of the sum over groups of the mean over replicates, and its degrees of freedom.

    Groups are drawn apart, so their variances add up, each known by K - 1 degrees of freedom [Satterthwaite].
    """
    replicates = groups.shape[1]
    if exact:
        return 0.0, math.inf
    if replicates < 2:
        return None, 0.0
    variances = groups.var(axis=1, ddof=1) / replicates
    total = float(variances.sum())
    freedom = math.inf if total == 0 else total**2 / float((variances**2).sum()) * (replicates - 1)
    return math.sqrt(total), freedom


def _deviations(nats: Nats) -> NDArray[np.float64]:
    """(D, K), what each document adds to the ratio sum nats / sum tokens beyond its share, by replicate."""
    total = nats.tokens.sum()
    mean = nats.documents.mean(axis=1).sum() / total
    return np.asarray((nats.documents - mean * nats.tokens[:, None]) / total)


def _over_documents(deviations: NDArray[np.float64]) -> float | None:
    """What the sum of deviations would vary by if other documents had been chosen.

    The mean of K replicates carries 1/K of what they vary by from draw to draw: that is not the documents' doing.
    """
    num, replicates = deviations.shape
    squares = float((deviations.mean(axis=1) ** 2).sum())
    noise = float(deviations.var(axis=1, ddof=1).sum()) / replicates if replicates > 1 else 0.0
    if num < 2 or (noise > 0 and squares <= noise):
        return None
    return math.sqrt((squares - noise) * num / (num - 1))


def _summed(group: int, nats: NDArray[np.float64], documents: NDArray[np.int64]) -> GroupNats:
    """From nats (K, tokens) and each token's document."""
    numbers, index, tokens = np.unique(documents, return_inverse=True, return_counts=True)
    by_document = np.stack([np.bincount(index, replicate, len(numbers)) for replicate in nats], axis=1)
    return GroupNats(group, numbers.tolist(), by_document.tolist(), tokens.tolist())


def _generator(seed: int, replicate: int, group: int) -> torch.Generator:
    """On the CPU, so that every device sees the same draws."""
    state = np.random.SeedSequence(seed, spawn_key=(replicate, group)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
