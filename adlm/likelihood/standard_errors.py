"""From the nats of a text to nats per token with two standard errors: Monte Carlo and over the choice of documents.

The nats of every predicted token are summed, including the bos and eos that frame a row; the sum is divided by the
number of tokens of the text alone (`adlm.data.rows.packing.counted_positions`). Arithmetic only: no networks.

Shapes: G groups of rows, K replicates, D documents.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError


@dataclass(frozen=True)
class GroupNats:
    """The nats of one group of rows. A journal line is this record as JSON."""

    group: int
    documents: list[int]
    """Indices of the documents with tokens in the group."""
    nats: list[list[float]]
    """(documents, K), per document and replicate."""
    tokens: list[int]
    """Number of counted tokens per document."""


@dataclass(frozen=True)
class Nats:
    """The nats of a text, broken down as the standard errors need them."""

    groups: NDArray[np.float64]
    """(G, K), per group and replicate."""
    documents: NDArray[np.float64]
    """(D, K), per document and replicate."""
    tokens: NDArray[np.int64]
    """(D,), number of counted tokens per document."""
    exact: bool
    """Whether the method is deterministic, so that all replicates are equal."""


@dataclass(frozen=True)
class Estimate:
    """Nats per token with two standard errors."""

    nats: float
    monte_carlo: float | None
    """Monte Carlo standard error, from the spread of the replicates; None with a single replicate."""
    over_documents: float | None
    """Standard error over the choice of documents, with the Monte Carlo variance subtracted.

    None (unknown) with fewer than two documents; with a single replicate, whose noise is shared by the documents of a
    row and cannot be subtracted; and where the Monte Carlo variance exceeds the total.
    """
    freedom: float
    """Degrees of freedom of `monte_carlo`."""
    tokens: int
    documents: int

    @property
    def stderr(self) -> float | None:
        """Both errors combined; None where one of them is unknown."""
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
        """95% Monte Carlo confidence interval of the bound on this text, in nats per token."""
        if self.monte_carlo is None:
            return None
        half_width = 0.0 if self.monte_carlo == 0 else t_quantile(self.freedom) * self.monte_carlo
        return self.nats - half_width, self.nats + half_width


def perplexity_of(nats: float) -> float:
    """e^nats; infinity where that overflows a float."""
    return math.exp(nats) if nats < 700 else math.inf


def nats_of(groups: list[GroupNats], exact: bool, repeats: int = 1) -> Nats:
    """Combine all groups of a text; a document may span several. Every row was scored `repeats` times."""
    ordered = sorted(groups, key=lambda group: group.group)
    ordered = [group for group in ordered if group.documents]  # a causal model predicts nothing in a one-token row
    if not any(sum(group.tokens) for group in ordered):
        raise UserError("no token is predicted: from left to right the first of a row is given; give a longer text")
    arrays = [np.asarray(group.nats, np.float64) for group in ordered]
    documents = np.concatenate([np.asarray(group.documents, np.int64) for group in ordered])
    numbers, index = np.unique(documents, return_inverse=True)
    by_document = np.zeros((len(numbers), arrays[0].shape[1]))
    np.add.at(by_document, index, np.concatenate(arrays))
    tokens = np.bincount(index, np.concatenate([group.tokens for group in ordered])).astype(np.int64)
    by_group = np.array([nats.sum(axis=0) for nats in arrays])
    return Nats(by_group / repeats, by_document / repeats, tokens // repeats, exact)


def summarize(nats: Nats) -> Estimate:
    """sum nats / sum tokens and its standard errors."""
    total = int(nats.tokens.sum())
    mean = float(nats.groups.mean(axis=1).sum() / total)
    monte_carlo, freedom = _monte_carlo(nats.groups / total, nats.exact)
    return Estimate(mean, monte_carlo, _over_documents(_deviations(nats), nats.exact), freedom, total, len(nats.tokens))


def difference(ours: Nats, theirs: Nats) -> Estimate:
    """`ours` - `theirs` per token, on the same rows and random numbers, so that most of the noise cancels."""
    random = [nats for nats in (ours, theirs) if not nats.exact]
    if len(ours.tokens) != len(theirs.tokens) or len({nats.groups.shape for nats in random}) > 1:
        raise UserError("the two were measured on different rows; measure both in one call")
    first, second = summarize(ours), summarize(theirs)
    by_group = [nats.groups / nats.tokens.sum() for nats in random]  # exact nats have no Monte Carlo variance
    gap = by_group[0] - by_group[1] if len(random) == 2 else by_group[0] if random else np.zeros((1, 1))
    monte_carlo, freedom = _monte_carlo(gap, exact=not random)
    return Estimate(
        first.nats - second.nats,
        monte_carlo,
        _over_documents(_deviations(ours) - _deviations(theirs), exact=not random),
        freedom,
        first.tokens,
        first.documents,
    )


def t_quantile(freedom: float) -> float:
    """The 97.5% point of Student's t distribution."""
    from scipy.special import stdtrit  # slow to import, and sampling needs none of it

    return float(stdtrit(freedom, 0.975))


def _monte_carlo(groups: NDArray[np.float64], exact: bool) -> tuple[float | None, float]:
    """The standard error of the sum over groups of the mean over replicates, and its degrees of freedom.

    Groups are independent, so their variances add up, each with K - 1 degrees of freedom [Satterthwaite].
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
    """(D, K), (nats - mean * tokens) / sum tokens: each document's contribution to the error of the ratio estimate."""
    total = nats.tokens.sum()
    mean = nats.documents.mean(axis=1).sum() / total
    return np.asarray((nats.documents - mean * nats.tokens[:, None]) / total)


def _over_documents(deviations: NDArray[np.float64], exact: bool) -> float | None:
    """The standard deviation of the sum of deviations over the choice of documents.

    The mean of K replicates has 1/K of the Monte Carlo variance, which is subtracted.
    """
    num, replicates = deviations.shape
    if num < 2 or (replicates < 2 and not exact):
        return None
    squares = float((deviations.mean(axis=1) ** 2).sum())
    noise = float(deviations.var(axis=1, ddof=1).sum()) / replicates if replicates > 1 else 0.0
    if noise > 0 and squares <= noise:
        return None
    return math.sqrt((squares - noise) * num / (num - 1))
