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
    nats: list[float]
    """Of each replicate, summed over the group."""
    documents: list[int]
    """The documents that the group has tokens of."""
    document_nats: list[float]
    """Of each of them, the mean over replicates."""
    document_tokens: list[int]


@dataclass(frozen=True)
class Nats:
    """What a text costs, kept apart as the errors need it."""

    groups: NDArray[np.float64]
    """(G, K), of each group and replicate."""
    documents: NDArray[np.float64]
    """(D,), of each document, the mean over replicates."""
    tokens: NDArray[np.int64]
    """(D,), its tokens that are predicted."""
    exact: bool
    """Whether nothing is drawn, so that replicates are all alike."""


@dataclass(frozen=True)
class Estimate:
    """Nats a token with two standard errors."""

    nats: float
    monte_carlo: float | None
    """Of the draws, by what replicates differ in; None where there is only one."""
    over_documents: float | None
    """Of the choice of documents, draws included; None where there are fewer than two."""
    freedom: float
    """Degrees of freedom of the first."""
    tokens: int
    documents: int

    @property
    def stderr(self) -> float:
        """The larger of the two: documents that share a row share its draw too. NaN where neither is known."""
        return max((error for error in (self.over_documents, self.monte_carlo) if error is not None), default=math.nan)

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)

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
        by_token: list[NDArray[np.float64]] = []
        sums = np.zeros(samples)
        counts, documents = [], []
        for start in range(0, len(members), batch):
            some = members[start : start + batch]
            read, padding = rows.read(some)
            x, pad = torch.from_numpy(read), None if padding is None else torch.from_numpy(padding)
            portion = Portion(start, len(members))
            nats = torch.zeros(x.shape, dtype=torch.float64)
            for replicate in range(samples):
                generator = _generator(seed, replicate, group)
                drawn = estimator(
                    network, x.to(device), None if pad is None else pad.to(device), generator, portion
                ).double()
                if not drawn.isfinite().all():
                    raise UserError("the model's nats are not finite: its weights or its precision do not hold")
                sums[replicate] += float(drawn.sum())
                nats += drawn.cpu() / samples
            by_token.append(nats.numpy()[method.predicted(x, pad).numpy()])
            documents.append(rows.documents(some)[method.predicted(x, pad).numpy()])
            counts.append(len(by_token[-1]))
        yield _summed(group, sums, np.concatenate(by_token), np.concatenate(documents))


def group_size(length: int) -> int:
    """Rows in a group."""
    return max(1, TOKENS_A_GROUP // length)


def num_groups(num_rows: int, length: int) -> int:
    return -(-num_rows // group_size(length))


def nats_of(groups: list[GroupNats], exact: bool) -> Nats:
    """All groups of a text, put together; a document may lie in several."""
    ordered = sorted(groups, key=lambda group: group.group)
    documents = np.concatenate([np.asarray(group.documents, np.int64) for group in ordered])
    _, index = np.unique(documents, return_inverse=True)
    nats = np.bincount(index, np.concatenate([group.document_nats for group in ordered])).astype(np.float64)
    tokens = np.bincount(index, np.concatenate([group.document_tokens for group in ordered])).astype(np.int64)
    return Nats(np.array([group.nats for group in ordered]), nats, tokens, exact)


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
    """The 97.5% point of Student's t, by Cornish and Fisher's expansion: within 1% from 3 degrees of freedom on."""
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
    """(D,), what each document adds to the ratio sum nats / sum tokens beyond its share."""
    total = nats.tokens.sum()
    mean = nats.documents.sum() / total
    return np.asarray((nats.documents - mean * nats.tokens) / total)


def _over_documents(deviations: NDArray[np.float64]) -> float | None:
    num = len(deviations)
    return None if num < 2 else math.sqrt(float((deviations**2).sum()) * num / (num - 1))


def _summed(
    group: int, sums: NDArray[np.float64], nats: NDArray[np.float64], documents: NDArray[np.int64]
) -> GroupNats:
    numbers, index, tokens = np.unique(documents, return_inverse=True, return_counts=True)
    by_document = np.bincount(index, nats, len(numbers))
    return GroupNats(group, sums.tolist(), numbers.tolist(), by_document.tolist(), tokens.tolist())


def _generator(seed: int, replicate: int, group: int) -> torch.Generator:
    """On the CPU, so that every device sees the same draws."""
    state = np.random.SeedSequence((seed, replicate, group)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
