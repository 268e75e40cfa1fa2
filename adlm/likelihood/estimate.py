"""Nats per token of a text with two standard errors: of the random draws and of the choice of documents. No training.

Rows are taken in groups. A group's draws belong to (seed, replicate, group), its times stratified over its rows; so
neither the size of a batch nor the number of processes changes what is drawn, and every model sees the same.

The nats of every predicted token are summed, the bos and eos that frame a row included; the sum is divided by the
tokens of the text alone (`adlm.data.rows.packing.counted_positions`).

Shapes: R rows of L ids in G groups, K replicates, D documents; `pad` is True at padding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.methods.method import Method

TOKENS_A_GROUP = 2**16  # 64 rows of 1024: at most this many are read at once, so that a batch never spans two groups

Estimator = Callable[[Any, Tensor, Tensor | None, torch.Generator, BatchSlice], Tensor]
"""(network, x (B, L), pad, generator, portion) -> nats (B, L) whose expectation is the bound."""


class TextRows(Protocol):
    """Rows of one length, and which document each of their tokens is of."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """ids (n, L) and pad (n, L), or no pad where there is none."""
        ...

    def counted(self, x: NDArray[np.int64], pad: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """(n, L), True at the tokens of the text, False at the bos and eos of the rows."""
        ...

    def documents(self, rows: Any) -> NDArray[np.int64]:
        """(n, L), the number of each token's document: the unit whose choice the error over documents is of."""
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
    """Of each of them, those that count."""


@dataclass(frozen=True)
class Nats:
    """What a text costs, kept apart as the errors need it."""

    groups: NDArray[np.float64]
    """(G, K), of each group and replicate."""
    documents: NDArray[np.float64]
    """(D, K), of each document and replicate."""
    tokens: NDArray[np.int64]
    """(D,), the document's tokens that count."""
    exact: bool
    """Whether nothing is drawn, so that replicates are all alike."""


@dataclass(frozen=True)
class Estimate:
    """Nats a token with two standard errors."""

    nats: float
    monte_carlo: float | None
    """Of the draws, by what replicates differ in; None where there is only one."""
    over_documents: float | None
    """Of the choice of documents, the variance of the draws subtracted.

    None (unknown) with fewer than two documents; with a single replicate, whose noise cannot be subtracted and is
    shared by the documents of a row; and where the draws vary so much that nothing is left.
    """
    freedom: float
    """Degrees of freedom of the first."""
    tokens: int
    documents: int

    @property
    def stderr(self) -> float | None:
        """Of draws and documents together; None where one of them is unknown."""
        if self.monte_carlo is None or self.over_documents is None:
            return None
        return math.hypot(self.monte_carlo, self.over_documents)

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nats)

    def interval(self) -> tuple[float, float] | None:
        """Of 95% confidence for the bound on this very text, in nats a token."""
        if self.monte_carlo is None:
            return None
        reach = 0.0 if self.monte_carlo == 0 else t_quantile(self.freedom) * self.monte_carlo
        return self.nats - reach, self.nats + reach


def perplexity_of(nats: float) -> float:
    """e^nats; infinite where no number is so large."""
    return math.exp(nats) if nats < 700 else math.inf


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
        by_token, counted, documents = [], [], []
        for start in range(0, len(members), batch):
            some = members[start : start + batch]
            read, padding, its_documents = *rows.read(some), rows.documents(some)
            if len(rows) == 1 and padding is not None and method.config.data.pad != "attended":
                text = ~padding[0]  # a single row needs no padding
                read, padding, its_documents = read[:, text], None, its_documents[:, text]
            x, pad = torch.from_numpy(read), None if padding is None else torch.from_numpy(padding)
            there, there_pad = x.to(device), None if pad is None else pad.to(device)
            predicted = method.predicted(x, pad).numpy()
            drawn = [
                estimator(
                    network, there, there_pad, _generator(seed, replicate, group), BatchSlice(start, len(members))
                )
                for replicate in range(samples)
            ]
            by_token.append(torch.stack(drawn).double().cpu().numpy()[:, predicted])
            counted.append(rows.counted(read, padding)[predicted])
            documents.append(its_documents[predicted])
        nats = np.concatenate(by_token, axis=1)
        if not np.isfinite(nats).all():
            raise UserError(
                "the model's nats are not finite: its weights are damaged, or its logits are too large for their "
                "precision; measure another model"
            )
        yield _summed(group, nats, np.concatenate(counted), np.concatenate(documents))


def group_size(length: int) -> int:
    """Rows in a group."""
    return max(1, TOKENS_A_GROUP // length)


def num_groups(num_rows: int, length: int) -> int:
    return -(-num_rows // group_size(length))


def nats_of(groups: list[GroupNats], exact: bool, repeats: int = 1) -> Nats:
    """All groups of a text, put together; a document may lie in several. Every row was scored `repeats` times."""
    ordered = sorted(groups, key=lambda group: group.group)
    ordered = [group for group in ordered if group.documents]  # left to right a row of one token predicts none
    if not any(sum(group.tokens) for group in ordered):
        raise UserError("no token is predicted: from left to right the first of a row is given; give a longer text")
    each = [np.asarray(group.nats, np.float64) for group in ordered]
    documents = np.concatenate([np.asarray(group.documents, np.int64) for group in ordered])
    numbers, index = np.unique(documents, return_inverse=True)
    nats = np.zeros((len(numbers), each[0].shape[1]))
    np.add.at(nats, index, np.concatenate(each))
    tokens = np.bincount(index, np.concatenate([group.tokens for group in ordered])).astype(np.int64)
    by_group = np.array([part.sum(axis=0) for part in each])
    return Nats(by_group / repeats, nats / repeats, tokens // repeats, exact)


def summarize(nats: Nats) -> Estimate:
    """sum nats / sum tokens and its errors."""
    total = int(nats.tokens.sum())
    mean = float(nats.groups.mean(axis=1).sum() / total)
    monte_carlo, freedom = _monte_carlo(nats.groups / total, nats.exact)
    return Estimate(mean, monte_carlo, _over_documents(_deviations(nats), nats.exact), freedom, total, len(nats.tokens))


def difference(ours: Nats, theirs: Nats) -> Estimate:
    """Ours minus theirs, a token, on the same rows and draws: most of the noise is common and goes away."""
    drawn = [each for each in (ours, theirs) if not each.exact]
    if len(ours.tokens) != len(theirs.tokens) or len({each.groups.shape for each in drawn}) > 1:
        raise UserError("the two were measured on different rows; measure both in one call")
    first, second = summarize(ours), summarize(theirs)
    by_group = [each.groups / each.tokens.sum() for each in drawn]  # what is exact adds no variance
    apart = by_group[0] - by_group[1] if len(drawn) == 2 else by_group[0] if drawn else np.zeros((1, 1))
    monte_carlo, freedom = _monte_carlo(apart, exact=not drawn)
    return Estimate(
        first.nats - second.nats,
        monte_carlo,
        _over_documents(_deviations(ours) - _deviations(theirs), exact=not drawn),
        freedom,
        first.tokens,
        first.documents,
    )


def t_quantile(freedom: float) -> float:
    """The 97.5% point of Student's t distribution."""
    return float(stdtrit(freedom, 0.975))


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


def _over_documents(deviations: NDArray[np.float64], exact: bool) -> float | None:
    """The standard deviation of the sum of deviations over the choice of documents.

    The mean of K replicates carries 1/K of the draws' variance, which is subtracted.
    """
    num, replicates = deviations.shape
    if num < 2 or (replicates < 2 and not exact):
        return None
    squares = float((deviations.mean(axis=1) ** 2).sum())
    noise = float(deviations.var(axis=1, ddof=1).sum()) / replicates if replicates > 1 else 0.0
    if noise > 0 and squares <= noise:
        return None
    return math.sqrt((squares - noise) * num / (num - 1))


def _summed(
    group: int, nats: NDArray[np.float64], counted: NDArray[np.bool_], documents: NDArray[np.int64]
) -> GroupNats:
    """From nats (K, tokens), whether each token counts, and its document."""
    numbers, index = np.unique(documents, return_inverse=True)
    by_document = np.stack([np.bincount(index, replicate, len(numbers)) for replicate in nats], axis=1)
    tokens = np.bincount(index, counted, len(numbers)).astype(np.int64)
    return GroupNats(group, numbers.tolist(), by_document.tolist(), tokens.tolist())


def _generator(seed: int, replicate: int, group: int) -> torch.Generator:
    """On the CPU, so that every device sees the same draws."""
    state = np.random.SeedSequence(seed, spawn_key=(replicate, group)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
