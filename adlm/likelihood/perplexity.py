"""The nats of one text under one model, measured group by group. No command line.

The groups are divided among the processes; the result does not depend on their number. A journal has one line per
finished group. Interrupted measurements resume from it, with any number of processes: each process writes its own file
and reads those of all.
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
from adlm.files import parse_json, read_bytes, reporting_os_errors
from adlm.likelihood.estimate import GroupNats, Nats, TextRows, group_size, measure_groups, nats_of, num_groups
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.likelihood.names import AUTO, BATCH_TOKENS, BATCH_TOKENS_ON_GPU, MAX_REPLICATES
from adlm.limits import format_bytes, memory_of
from adlm.methods.method import Method

MIN_ROWS, MIN_TOKENS = 16, 2**11  # a replicate scores at least this many, repeating the rows of a short text


@dataclass(frozen=True)
class PerplexitySettings:
    """The options of a measurement."""

    estimator: str = AUTO
    """A key of ESTIMATORS; auto is any-order where it is valid, else nelbo: the same bound."""
    samples: int = 4
    """Number K of independent replicates; one for exact methods."""
    seed: int = 0
    batch: int | None = None
    """Rows per forward pass; affects speed and memory only. By default about 8,192 tokens, on a GPU 32,768."""
    max_tokens: int | None = None
    """Approximate limit on the number of tokens; rows are then taken evenly spaced over the whole text."""
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
            if value is not None and value > MAX_REPLICATES:
                raise UserError(f"{name} {value} must be at most {MAX_REPLICATES:,}; 4 to 64 are usual")
        if self.seed < 0:
            raise UserError(f"seed {self.seed} must be 0 or more")

    def estimator_of(self, method: Method) -> str:
        """The name of the estimator used for this method."""
        if method.exact:
            return "exact"
        return default_estimator(method) if self.estimator == AUTO else self.estimator

    def replicates(self, method: Method) -> int:
        return 1 if method.exact else self.samples


def _repeats(settings: PerplexitySettings, method: Method, rows: TextRows, chosen: NDArray[np.int64]) -> int:
    """How often each row is scored in a replicate: a short text is scored at many noise levels."""
    if method.exact:
        return 1
    if settings.repeats is not None:
        return settings.repeats
    num_tokens = _num_tokens(rows, chosen) if len(chosen) < MIN_TOKENS else MIN_TOKENS
    return math.ceil(max(1, MIN_ROWS / len(chosen), MIN_TOKENS / num_tokens))


def chosen_rows(rows: TextRows, max_tokens: int | None) -> NDArray[np.int64]:
    """The rows to measure: all, or evenly spaced ones with about `max_tokens` tokens."""
    num = len(rows) if max_tokens is None else min(len(rows), max(1, max_tokens // rows.length))
    return np.arange(num, dtype=np.int64) * len(rows) // num


def measure_nats(
    method: Method,
    network: Any,
    rows: TextRows,
    settings: PerplexitySettings,
    journal: Path | None = None,
    report_progress: Callable[[float, int], None] = lambda done, total: None,
) -> Nats:
    """The nats of the text. `journal` makes it resumable, group by group.

    `report_progress(done, total)` is called during the measurement, in tokens of the rows.
    """
    estimator = method.bound if method.exact else ESTIMATORS[settings.estimator_of(method)](method)
    replicates = settings.replicates(method)
    chosen = chosen_rows(rows, settings.max_tokens)
    repeats = _repeats(settings, method, rows, chosen)
    on_gpu = next(network.parameters()).device.type == "cuda"
    batch = settings.batch or max(1, (BATCH_TOKENS_ON_GPU if on_gpu else BATCH_TOKENS) // rows.length)
    _check_memory(replicates, min(len(chosen) * repeats, group_size(rows.length)) * rows.length)
    numbers = np.tile(chosen, repeats)
    total = num_groups(len(numbers), rows.length)
    rank, ranks = distributed.rank_and_size()
    journal_file = None if journal is None else journal.with_name(f"{journal.name}.{rank}-of-{ranks}")
    finished = {} if journal is None else _read_journal(journal, total, replicates)
    done = {number: group for number, group in finished.items() if number % ranks == rank}
    todo = (group for group in range(rank, total, ranks) if group not in done)
    size, num_scored = group_size(rows.length), 0.0

    def on_rows(num: float) -> None:
        nonlocal num_scored
        num_scored += num
        share = min(1.0, num_scored * ranks / len(numbers))
        report_progress(share * len(chosen) * rows.length, len(chosen) * rows.length)

    on_rows(sum(len(numbers[group * size : (group + 1) * size]) for group in done))
    for group in measure_groups(
        method, network, rows, numbers, estimator, replicates, settings.seed, batch, todo, on_rows
    ):
        done[group.group] = group
        if journal_file is not None:
            with reporting_os_errors(journal_file), journal_file.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(asdict(group))}")  # a new line first: the last one may be incomplete
    return nats_of(distributed.gather(list(done.values())), method.exact, repeats)


def _check_memory(replicates: int, tokens: int) -> None:
    """The nats of a group of rows are held in memory until it is done, 8 bytes per token and replicate."""
    needed, available = replicates * tokens * 8, memory_of(torch.device("cpu"))
    if needed > available:
        raise UserError(
            f"samples {replicates} of {tokens:,} tokens at once take {format_bytes(needed)} of memory, and this "
            f"machine has {format_bytes(available)}; take fewer"
        )


def _num_tokens(rows: TextRows, chosen: NDArray[np.int64]) -> int:
    x, pad = rows.read(chosen)
    return int(x.size if pad is None else (~pad).sum())


def delete_journal(journal: Path) -> None:
    """Delete the journal files of all processes, once the results are written."""
    for file in _journal_files(journal):
        file.unlink(missing_ok=True)


def _journal_files(journal: Path) -> list[Path]:
    return sorted(journal.parent.glob(f"{escape(journal.name)}.*-of-*"))


def _read_journal(journal: Path, total: int, replicates: int) -> dict[int, GroupNats]:
    """The groups in a journal by number; incomplete and damaged lines are skipped."""
    groups = {}
    for file in _journal_files(journal):
        for line in read_bytes(file).splitlines():
            try:
                group = GroupNats(**parse_json(line))
            except (ValueError, TypeError):
                continue
            if _is_valid(group, total, replicates):
                groups[group.group] = group
    return groups


def _is_valid(group: GroupNats, total: int, replicates: int) -> bool:
    if not all(isinstance(values, list) for values in (group.documents, group.tokens, group.nats)):
        return False
    integers = (group.group, *group.documents, *group.tokens)
    if not all(type(number) is int and 0 <= number < 2**62 for number in integers) or group.group >= total:
        return False
    if not len(group.documents) == len(group.tokens) == len(group.nats):
        return False
    rows_are_complete = all(isinstance(row, list) and len(row) == replicates for row in group.nats)
    return rows_are_complete and all(type(nats) is float and math.isfinite(nats) for row in group.nats for nats in row)
