"""Nats per token of a text with two standard errors: Monte Carlo and over the choice of documents. No training.

Rows are scored in groups. The RNG of a group is seeded by (seed, replicate, group), and its times are stratified over
its rows. So the random numbers depend neither on the batch size nor on the number of processes, and are the same for
every model.

The nats of every predicted token are summed, including the bos and eos that frame a row; the sum is divided by the
number of tokens of the text alone (`adlm.data.rows.packing.counted_positions`).

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

from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.errors import UserError
from adlm.methods.inputs import check_clean
from adlm.methods.method import Method

TOKENS_A_GROUP = 2**16  # 64 rows of 1024; also the largest batch, since a batch never spans two groups

Estimator = Callable[[Any, Tensor, Tensor | None, BatchRng], Tensor]
"""(network, x (B, L), pad, rng) -> nats (B, L) whose expectation is the bound."""


class TextRows(Protocol):
    """Rows of equal length, and the document of each token."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """ids (n, L) and pad (n, L), or None without padding."""
        ...

    def counted(self, x: NDArray[np.int64], pad: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """(n, L), True at the tokens of the text, False at padding and at the bos and eos of the rows."""
        ...

    def documents(self, rows: Any) -> NDArray[np.int64]:
        """(n, L), the index of each token's document, the sampling unit of the error over documents."""
        ...


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
    on_rows: Callable[[float], None] = lambda rows: None,
) -> Iterator[GroupNats]:
    """The nats of each of these groups of the rows `numbers`, `batch` rows at a time.

    `on_rows` is called for every replicate of a batch, with its share of the rows: their number / `samples`.
    """
    size, device = group_size(rows.length), next(network.parameters()).device
    for group in groups:
        members = numbers[group * size : (group + 1) * size]
        by_token, counted, documents = [], [], []
        for start in range(0, len(members), batch):
            batch_rows = members[start : start + batch]
            ids, padding, documents_of_ids = *rows.read(batch_rows), rows.documents(batch_rows)
            if len(rows) == 1 and padding is not None and method.config.data.pad != "attended":
                text = ~padding[0]  # a single row needs no padding
                ids, padding, documents_of_ids = ids[:, text], None, documents_of_ids[:, text]
            x, pad = torch.from_numpy(ids), None if padding is None else torch.from_numpy(padding)
            check_clean(method.config, x, pad)
            predicted = method.predicted(x, pad).numpy()
            x, pad = x.to(device), None if pad is None else pad.to(device)
            replicates = []
            for replicate in range(samples):
                rng = BatchRng(_generator(seed, replicate, group), BatchSlice(start, len(members)))
                replicates.append(estimator(network, x, pad, rng))
                on_rows(len(batch_rows) / samples)
            by_token.append(torch.stack(replicates).double().cpu().numpy()[:, predicted])
            counted.append(rows.counted(ids, padding)[predicted])
            documents.append(documents_of_ids[predicted])
        nats = np.concatenate(by_token, axis=1)
        if not np.isfinite(nats).all():
            raise UserError(
                "the model's nats are not finite: its weights are damaged, or its logits are too large for their "
                "precision; measure another model"
            )
        yield _sum_by_document(group, nats, np.concatenate(counted), np.concatenate(documents))


def group_size(length: int) -> int:
    """Number of rows in a group."""
    return max(1, TOKENS_A_GROUP // length)


def num_groups(num_rows: int, length: int) -> int:
    return -(-num_rows // group_size(length))


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


def _sum_by_document(
    group: int, nats: NDArray[np.float64], counted: NDArray[np.bool_], documents: NDArray[np.int64]
) -> GroupNats:
    """Sum nats (K, tokens) and counted tokens over each document."""
    numbers, index = np.unique(documents, return_inverse=True)
    by_document = np.stack([np.bincount(index, replicate, len(numbers)) for replicate in nats], axis=1)
    tokens = np.bincount(index, counted, len(numbers)).astype(np.int64)
    return GroupNats(group, numbers.tolist(), by_document.tolist(), tokens.tolist())


def _generator(seed: int, replicate: int, group: int) -> torch.Generator:
    """On the CPU, so that every device uses the same random numbers."""
    state = np.random.SeedSequence(seed, spawn_key=(replicate, group)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
