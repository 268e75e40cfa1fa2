"""One model on one text, measured group by group: shared among processes, kept as it goes, the same however it is run.

Knows no command line. A journal holds a line for every group that is done, so that what was interrupted goes on, with
any number of processes: each writes a file of its own and reads those of all.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm import distributed
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, writing
from adlm.likelihood.estimate import GroupNats, Nats, TextRows, group_size, measure_groups, nats_of, num_groups
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.limits import format_bytes, memory_of
from adlm.methods.method import Method

AUTO = "auto"
AT_ONCE, AT_ONCE_ON_GPU = 2**13, 2**15  # tokens read at once
LEAST_ROWS, LEAST_TOKENS = 16, 2**11  # that a replicate scores, by scoring the rows of a short text repeatedly
MOST_REPLICATES = 100_000


@dataclass(frozen=True)
class PerplexitySettings:
    """How it is measured."""

    estimator: str = AUTO
    """A key of ESTIMATORS; auto is any-order where it is valid, else nelbo: the same bound."""
    samples: int = 4
    """Independent replicates K of the draws; one for exact methods."""
    seed: int = 0
    batch: int | None = None
    """Rows read at once: changes nothing but speed and memory. By default about 8,192 tokens, on a GPU 32,768."""
    max_tokens: int | None = None
    """About how many tokens at most; rows are then taken evenly from all over the text."""
    repeats: int | None = None
    """How often a replicate scores each row, at stratified noise levels; by default more than once for short texts."""

    def __post_init__(self) -> None:
        if self.estimator not in (AUTO, *ESTIMATORS):
            raise UserError(f"estimator {self.estimator!r} is not one of {', '.join((AUTO, *ESTIMATORS))}")
        for name in ("samples", "batch", "max_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")
        for name in ("samples", "repeats"):
            value = getattr(self, name)
            if value is not None and value > MOST_REPLICATES:
                raise UserError(f"{name} {value} must be at most {MOST_REPLICATES:,}; 4 to 64 are usual")
        if self.seed < 0:
            raise UserError(f"seed {self.seed} must be 0 or more")

    def estimator_of(self, method: Method) -> str:
        """The name of the estimator that this method is measured by."""
        if method.exact:
            return "exact"
        return default_estimator(method) if self.estimator == AUTO else self.estimator

    def replicates(self, method: Method) -> int:
        return 1 if method.exact else self.samples


def repeats_of(recipe: PerplexitySettings, method: Method, rows: TextRows, chosen: NDArray[np.int64]) -> int:
    """How often each row is scored in a replicate: a text of few tokens is scored at many noise levels at once."""
    if method.exact:
        return 1
    if recipe.repeats is not None:
        return recipe.repeats
    num_tokens = _num_tokens(rows, chosen) if len(chosen) < LEAST_TOKENS else LEAST_TOKENS
    return math.ceil(max(1, LEAST_ROWS / len(chosen), LEAST_TOKENS / num_tokens))


def chosen_rows(rows: TextRows, max_tokens: int | None) -> NDArray[np.int64]:
    """The rows that are measured: all, or as many as hold so many tokens, evenly spread."""
    num = len(rows) if max_tokens is None else min(len(rows), max(1, max_tokens // rows.length))
    return np.arange(num, dtype=np.int64) * len(rows) // num


def measure_nats(
    method: Method,
    network: Any,
    rows: TextRows,
    recipe: PerplexitySettings,
    journal: Path | None = None,
    tell: Callable[[int, int], None] = lambda done, in_all: None,
) -> Nats:
    """What the text costs. `tell` hears how many groups of how many are done."""
    estimator = method.bound if method.exact else ESTIMATORS[recipe.estimator_of(method)].of(method)
    replicates = recipe.replicates(method)
    once = chosen_rows(rows, recipe.max_tokens)
    repeats = repeats_of(recipe, method, rows, once)
    at_once = AT_ONCE_ON_GPU if next(network.parameters()).device.type == "cuda" else AT_ONCE
    batch = recipe.batch or max(1, at_once // rows.length)
    _check_samples(replicates, min(len(once) * repeats, group_size(rows.length)) * rows.length)
    numbers = np.tile(once, repeats)
    in_all = num_groups(len(numbers), rows.length)
    rank, ranks = distributed.rank_and_size()
    own = None if journal is None else journal.with_name(f"{journal.name}.{rank}-of-{ranks}")
    kept = {} if journal is None else _read(journal, in_all, replicates)
    done = {number: group for number, group in kept.items() if number % ranks == rank}
    todo = (group for group in range(rank, in_all, ranks) if group not in done)
    tell(min(in_all, len(done) * ranks), in_all)
    for group in measure_groups(method, network, rows, numbers, estimator, replicates, recipe.seed, batch, todo):
        done[group.group] = group
        if own is not None:
            with writing(own), own.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(asdict(group))}")  # on a new line, whatever was cut off before it
        tell(min(in_all, len(done) * ranks), in_all)
    return nats_of(distributed.gather(list(done.values())), method.exact, repeats)


def _check_samples(replicates: int, tokens: int) -> None:
    """The draws of a group of rows are held until it is done, 8 bytes for each token."""
    needed, there = replicates * tokens * 8, memory_of(torch.device("cpu"))
    if needed > there:
        raise UserError(
            f"samples {replicates} of {tokens:,} tokens at once take {format_bytes(needed)} of memory, and this "
            f"machine has {format_bytes(there)}; take fewer"
        )


def _num_tokens(rows: TextRows, chosen: NDArray[np.int64]) -> int:
    x, pad = rows.read(chosen)
    return int(x.size if pad is None else (~pad).sum())


def delete_journal(journal: Path) -> None:
    """What the journal's processes kept, once the figures are where they belong."""
    for file in _files(journal):
        file.unlink(missing_ok=True)


def _files(journal: Path) -> list[Path]:
    return sorted(journal.parent.glob(f"{escape(journal.name)}.*-of-*"))


def _read(journal: Path, in_all: int, replicates: int) -> dict[int, GroupNats]:
    """The groups that a journal holds; a line that was cut off while it was written, or damaged, is none."""
    groups = {}
    for file in _files(journal):
        for line in read_bytes(file).splitlines():
            try:
                group = GroupNats(**parse_json(line))
            except (ValueError, TypeError):
                continue
            if _is_group(group, in_all, replicates):
                groups[group.group] = group
    return groups


def _is_group(given: GroupNats, in_all: int, replicates: int) -> bool:
    if not all(isinstance(each, list) for each in (given.documents, given.tokens, given.nats)):
        return False
    whole = (given.group, *given.documents, *given.tokens)
    if not all(type(number) is int and 0 <= number < 2**62 for number in whole) or given.group >= in_all:
        return False
    if not len(given.documents) == len(given.tokens) == len(given.nats):
        return False
    rows_are_whole = all(isinstance(row, list) and len(row) == replicates for row in given.nats)
    return rows_are_whole and all(type(nats) is float and math.isfinite(nats) for row in given.nats for nats in row)
