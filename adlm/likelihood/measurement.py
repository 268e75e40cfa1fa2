"""The nats of a text under a model: of a long one by groups of rows, of a short one by token. No command line.

The RNG of a group is seeded by (seed, replicate, group), and its times are stratified over its rows. So the random
numbers depend neither on the batch size nor on the number of processes, and are the same for every model. The groups
are divided among the processes. A journal has one line per finished group: interrupted measurements resume from it,
with any number of processes, each of which writes its own file and reads those of all.

Shapes: R rows of L ids, K replicates (or samples of a short text); `pad` is True at padding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm import distributed
from adlm.data.rows.packing import Rows
from adlm.diffusion.times import BatchRng, BatchSlice, keyed_generator
from adlm.errors import UserError
from adlm.files import Journal, json_lines, opened, reporting_os_errors
from adlm.likelihood.estimators import ESTIMATORS, default_estimator, estimator_of
from adlm.likelihood.settings import BATCH_TOKENS, BATCH_TOKENS_ON_GPU, PerplexitySettings
from adlm.likelihood.standard_errors import GroupNats, Nats, nats_of, perplexity_of
from adlm.likelihood.text_sets import rows_of_texts
from adlm.limits import format_bytes, memory_of
from adlm.methods.inputs import check_clean, given_option
from adlm.methods.method import Method
from adlm.tokens import Tokenizer

MIN_ROWS, MIN_TOKENS = 16, 2**11  # a replicate scores at least this many, repeating the rows of a short text
TOKENS_A_GROUP = 2**16  # 64 rows of 1024; also the largest batch, since a batch never spans two groups


def chosen_rows(rows: Rows, max_tokens: int | None) -> NDArray[np.int64]:
    """The rows to measure: all, or evenly spaced ones with about `max_tokens` tokens."""
    num = len(rows) if max_tokens is None else min(len(rows), max(1, max_tokens // rows.length))
    return np.arange(num, dtype=np.int64) * len(rows) // num


def _repeats(settings: PerplexitySettings, method: Method, rows: Rows, chosen: NDArray[np.int64]) -> int:
    """How often each row is scored in a replicate: a short text is scored at many noise levels."""
    if settings.is_exact(method):
        return 1
    if settings.repeats is not None:
        return settings.repeats
    num_tokens = MIN_TOKENS
    if len(chosen) < MIN_TOKENS:
        x, pad = rows.read(chosen)
        num_tokens = int(x.size if pad is None else (~pad).sum())
    return math.ceil(max(1, MIN_ROWS / len(chosen), MIN_TOKENS / num_tokens))


def measure_nats(
    method: Method,
    network: Any,
    rows: Rows,
    settings: PerplexitySettings,
    journal: Path | None = None,
    report_progress: Callable[[float, int], None] = lambda done, total: None,
) -> Nats:
    """The nats of the text. `journal` makes it resumable, group by group.

    `report_progress(done, total)` is called during the measurement, in tokens of the rows.
    """
    estimator = estimator_of(method, settings)
    replicates, device = settings.replicates(method), next(network.parameters()).device
    chosen = chosen_rows(rows, settings.max_tokens)
    repeats = _repeats(settings, method, rows, chosen)
    numbers = np.tile(chosen, repeats)
    size = max(1, TOKENS_A_GROUP // rows.length)
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    batch = settings.batch or max(1, (BATCH_TOKENS_ON_GPU if device.type == "cuda" else BATCH_TOKENS) // rows.length)
    # the nats of a group are held in memory until it is done
    needed, available = replicates * len(groups[0]) * rows.length * 8, memory_of(torch.device("cpu"))
    if needed > available:
        raise UserError(
            f"samples {replicates} of {len(groups[0]) * rows.length:,} tokens at once take {format_bytes(needed)} of "
            f"memory, and this machine has {format_bytes(available)}; take fewer"
        )
    rank, ranks = distributed.rank_and_size()
    finished = {} if journal is None else _read_journal(journal, len(groups), replicates)
    done = {number: group for number, group in finished.items() if number % ranks == rank}
    num_scored = 0.0

    def on_rows(num: float) -> None:
        nonlocal num_scored
        num_scored += num
        share = min(1.0, num_scored * ranks / len(numbers))
        report_progress(share * len(chosen) * rows.length, len(chosen) * rows.length)

    def measure_group(group: int) -> GroupNats:
        members, by_token, counted, documents = groups[group], [], [], []
        for start in range(0, len(members), batch):
            batch_rows = members[start : start + batch]
            ids, padding, documents_of_ids = *rows.read(batch_rows), rows.documents(batch_rows)
            is_given = rows.given(batch_rows)
            if len(rows) == 1 and padding is not None and method.config.data.pad != "attended":
                text = ~padding[0]  # a single row needs no padding
                ids, padding, documents_of_ids = ids[:, text], None, documents_of_ids[:, text]
                is_given = None if is_given is None else is_given[:, text]
            x = torch.from_numpy(ids)
            pad, given = (None if each is None else torch.from_numpy(each) for each in (padding, is_given))
            check_clean(method.config, x, pad)
            predicted = method.predicted(x, pad, **given_option(given)).numpy()
            x = x.to(device)
            pad, given = (None if each is None else each.to(device) for each in (pad, given))
            drawn = []
            for replicate in range(replicates):
                generator = keyed_generator(settings.seed, replicate, group)
                rng = BatchRng(generator, BatchSlice(start, len(members)))
                drawn.append(estimator(network, x, pad, rng, **given_option(given)))
                on_rows(len(batch_rows) / replicates)
            by_token.append(torch.stack(drawn).double().cpu().numpy()[:, predicted])
            counted.append(rows.counted(ids, padding)[predicted])
            documents.append(documents_of_ids[predicted])
        nats = np.concatenate(by_token, axis=1)
        if not np.isfinite(nats).all():
            raise UserError(
                "the model's nats are not finite: its weights are damaged, or its logits are too large for their "
                "precision; measure another model"
            )
        indices, index = np.unique(np.concatenate(documents), return_inverse=True)
        by_document = np.stack([np.bincount(index, replicate, len(indices)) for replicate in nats], axis=1)
        tokens = np.bincount(index, np.concatenate(counted), len(indices)).astype(np.int64)
        return GroupNats(group, indices.tolist(), by_document.tolist(), tokens.tolist())

    on_rows(sum(len(groups[number]) for number in done))
    with _own_journal(journal, f"{rank}-of-{ranks}") as own_journal:
        for number in range(rank, len(groups), ranks):
            if number not in done:
                done[number] = measure_group(number)
                if own_journal is not None:
                    with reporting_os_errors(own_journal.path):
                        own_journal.append(asdict(done[number]))
    return nats_of(distributed.gather(list(done.values())), settings.is_exact(method), repeats)


@contextmanager
def _own_journal(journal: Path | None, process: str) -> Iterator[Journal | None]:
    """The journal file of this process; what it measures depends on is hashed in its name, so it has no header."""
    if journal is None:
        yield None
        return
    path = journal.with_name(f"{journal.name}.{process}")
    with closing(Journal(path, f"{path} is being written by another process; wait for it, or stop it")) as own:
        for _ in own.entries():
            pass  # new groups are appended after those of an interrupted run
        try:
            yield own
        finally:
            if own.is_empty:
                path.unlink(missing_ok=True)


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
        with opened(file) as lines:
            contents = [content for _, content in json_lines(lines)]
        for content in contents:
            try:
                group = GroupNats(**content)
            except TypeError:
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


@dataclass(frozen=True)
class TokenRow:
    """A text as the one row that the model scores: framed by bos and eos, as in `LanguageModel.perplexity`."""

    x: Tensor
    """(1, L)"""
    pad: Tensor | None
    """(1, L), True at padding; None where attention ignores padding, which is then left out."""
    counted: Tensor
    """(1, L), True at the tokens that the nats per token are divided by."""


@dataclass(frozen=True)
class TokenNats:
    """The bound of a text and of its tokens."""

    nats: Tensor
    """(L,), the mean over the samples; 0 where a token is given (the first one of causal methods)."""
    stderr: Tensor
    """(L,), Monte Carlo standard errors; 0 for exact methods."""
    total: float
    total_stderr: float
    tokens: int

    @property
    def per_token(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.per_token)


def token_row(method: Method, text: str, tokenizer: Tokenizer) -> TokenRow:
    """The row of a text; a user error if it has more than one."""
    length = method.config.length
    rows = rows_of_texts([text], tokenizer, length)
    if len(rows) > 1:
        raise UserError(f"the text takes {len(rows)} rows of the model's length {length}; shorten it")
    ids, padding = rows.read(np.arange(1))
    counted = rows.counted(ids, padding)
    if padding is not None and method.config.data.pad != "attended":
        text_positions = ~padding[0]
        ids, counted, padding = ids[:, text_positions], counted[:, text_positions], None
    x, pad = torch.from_numpy(ids), None if padding is None else torch.from_numpy(padding)
    check_clean(method.config, x, pad)
    if not (method.predicted(x, pad) & torch.from_numpy(counted)).any():
        raise UserError("no token is predicted: from left to right the first of a row is given; give a longer text")
    return TokenRow(x, pad, torch.from_numpy(counted))


def draw_token_nats(method: Method, network: Any, row: TokenRow, samples: int, seed: int = 0) -> Iterator[Tensor]:
    """(K, L) in parts of some samples: unbiased estimates of the bound, each at other noise levels; one if exact."""
    estimator = method.bound if method.exact else ESTIMATORS[default_estimator(method)](method)
    device = next(network.parameters()).device
    at_once = max(1, (BATCH_TOKENS_ON_GPU if device.type == "cuda" else BATCH_TOKENS) // row.x.shape[1])
    generator, num_left = torch.Generator().manual_seed(seed), 1 if method.exact else samples
    while num_left > 0:
        num = min(at_once, num_left)
        x, pad = (None if each is None else each.expand(num, -1).to(device) for each in (row.x, row.pad))
        yield estimator(network, x, pad, BatchRng(generator)).double().cpu()  # type: ignore[arg-type]
        num_left -= num


def mean_token_nats(method: Method, row: TokenRow, samples: Tensor) -> TokenNats:
    """The means of samples (K, L) and their standard errors, which stratified noise levels make a little too large."""
    if not samples.isfinite().all():
        raise UserError("the model's nats are not finite: its weights are damaged or its precision is too low")
    predicted = method.predicted(row.x, row.pad)
    sums = (samples * predicted).sum(dim=1)
    root = math.sqrt(len(samples))
    exact = len(samples) == 1
    return TokenNats(
        nats=samples.mean(dim=0) * predicted[0],
        stderr=torch.zeros(samples.shape[1]) if exact else samples.std(dim=0) / root,
        total=float(sums.mean()),
        total_stderr=0.0 if exact else float(sums.std()) / root,
        tokens=int((predicted & row.counted).sum()),
    )
