"""Generative perplexity: the perplexity of samples under a judge, a causal language model. No files.

There are two conventions for the start of a text (START in inputs.py): its first token is given and not counted, as
published for judges of the hub; or every window begins with the judge's bos, like the training rows of our own models.
A text longer than the judge's context is read in windows that overlap by half, so that every token is predicted exactly
once.

Shapes: B windows of L ids; `pad` is True past the end of a window. A sample is n ids and has n nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.apps.judge.diversity import Mean, mean_of
from adlm.apps.judge.inputs import Eos, Start
from adlm.errors import UserError
from adlm.likelihood.standard_errors import Nats, summarize

TokenNats = NDArray[np.float32]


@dataclass(frozen=True)
class JudgeInfo:
    """Description of a judge."""

    name: str
    kind: str
    """hugging-face or adlm."""
    weights: str
    """sha256 of its weights."""
    tokenizer: str
    tokenizer_sha256: str
    """Samples of a tokenizer with the same sha256 need not be retokenized."""
    context: int
    """Maximum number of tokens in one forward pass."""
    bos_id: int | None
    eos_id: int | None
    device: str
    dtype: str
    bos_eos_in_rows: bool = False
    """Whether every training row was [bos] ... [eos], so that the model expects eos at the end of its context."""


class Judge(Protocol):
    """A causal language model that gives the nats of each token given those before it."""

    @property
    def about(self) -> JudgeInfo: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The judge's ids of texts; bos and eos written as text become special tokens."""
        ...

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        """(B, L), -log p(x_i | x_<i) within the window; 0 at the first token and at padding."""
        ...


class Window(NamedTuple):
    sample: int
    start: int
    stop: int
    new: int
    """The nats of the tokens from here on are used; those before are context."""


@dataclass(frozen=True)
class JudgePerplexity:
    """exp of the nats per token; its standard error is value * nats_stderr (delta method)."""

    value: float | None
    stderr: float | None
    nats: float | None
    nats_stderr: float | None


@dataclass(frozen=True)
class GenerativePerplexity:
    """Three common averages; each is over all samples with at least one counted token."""

    pooled: JudgePerplexity
    """exp(sum nats / sum tokens): long samples weigh more. The published metric."""
    of_mean_nats: JudgePerplexity
    """exp(mean over samples of nats per token): every sample weighs the same."""
    mean_of_perplexities: Mean
    """mean over samples of exp(nats per token): dominated by the worst samples."""
    num_samples: int
    num_tokens: int
    num_uncounted: int
    """Samples without a counted token: empty, or a single token that is given."""


@dataclass(frozen=True)
class WindowLayout:
    """How texts are divided into windows for a judge."""

    bos_id: int | None
    """The first token of every window; None where a text's first token is given instead."""
    room: int
    """Maximum number of text tokens in a window."""
    closing_id: int | None
    """An eos that may follow them, at the end of the context, where the judge expects it."""


def scoring_convention(about: JudgeInfo, start: Start | None, eos: Eos | None) -> tuple[Start, Eos]:
    """The requested conventions; defaults: as in training for our own judges, as published for judges of the hub."""
    if start == "bos" and about.bos_id is None:
        raise UserError(f"--start bos: the judge {about.name} has no bos token; use --start given")
    return start or ("bos" if about.bos_eos_in_rows else "given"), eos or (
        "closing" if about.bos_eos_in_rows else "published"
    )


def window_layout(about: JudgeInfo, start: Start, context: int) -> WindowLayout:
    has_boundaries = start == "bos" and about.bos_eos_in_rows
    room = context - (start == "bos") - has_boundaries
    min_room = 1 if start == "bos" else 2
    if room < min_room:
        raise UserError(
            f"--context {context} is too short: a token is predicted from at least one before it; give "
            f"{min_room + context - room}"
        )
    return WindowLayout(about.bos_id if start == "bos" else None, room, about.eos_id if has_boundaries else None)


def truncate_texts(rows: Sequence[Sequence[int]], layout: WindowLayout, max_tokens: int | None) -> list[list[int]]:
    """The first `max_tokens` ids of each text, without a leading bos where the layout adds one to every window."""
    has_bos = [bool(row) and layout.bos_id is not None and row[0] == layout.bos_id for row in rows]
    return [list(row[int(skip) :][:max_tokens]) for row, skip in zip(rows, has_bos, strict=True)]


def split_into_windows(sample: int, row: Sequence[int], layout: WindowLayout) -> list[Window]:
    """Windows of at most `room` tokens; each but the first begins with `room` // 2 tokens of context."""
    closed = len(row) > 0 and layout.closing_id is not None and row[-1] == layout.closing_id
    num = len(row) - closed
    windows: list[Window] = []
    seen = 0 if layout.bos_id is not None else 1  # a first token that is given is not predicted
    while seen < num or (closed and not windows):
        start = 0 if not windows else seen - layout.room // 2
        stop = min(start + layout.room, num)
        windows.append(Window(sample, start, stop, seen))
        seen = max(stop, 1)
    if closed:
        windows[-1] = windows[-1]._replace(stop=len(row))
    return windows


@torch.no_grad()
def token_nats(judge: Judge, rows: Sequence[Sequence[int]], batch: int, layout: WindowLayout) -> list[TokenNats]:
    """The nats of each token of each row; 0 for a first token that is given."""
    nats = [np.zeros(len(row), np.float32) for row in rows]
    windows = [window for number, row in enumerate(rows) for window in split_into_windows(number, row, layout)]
    windows.sort(key=lambda window: window.stop - window.start)  # similar lengths in a batch: little padding
    bos = [] if layout.bos_id is None else [layout.bos_id]
    for first in range(0, len(windows), batch):
        batch_windows = windows[first : first + batch]
        texts = [[*bos, *rows[window.sample][window.start : window.stop]] for window in batch_windows]
        # padded on the right, which does not affect a causal model
        x = pad_sequence([torch.tensor(text, dtype=torch.int64) for text in texts], batch_first=True)
        pad = torch.arange(x.shape[1]) >= torch.tensor([len(text) for text in texts])[:, None]
        for window, window_nats in zip(batch_windows, judge.nats(x, pad).cpu().numpy(), strict=True):
            new = slice(len(bos) + window.new - window.start, len(bos) + window.stop - window.start)
            nats[window.sample][window.new : window.stop] = window_nats[new]
    for row in nats:
        if not np.isfinite(row).all():
            position = int(np.flatnonzero(~np.isfinite(row))[0])
            raise UserError(
                f"the judge {judge.about.name} gives {row[position]} nats for token {position} of a text, which is not "
                "a likelihood: its weights are damaged, or it cannot read this text; give another --model"
            )
    return nats


def counted(ids: Sequence[int], eos_id: int | None, eos: Eos, start: Start) -> NDArray[np.bool_]:
    """(n,), True at the tokens that are counted (see EOS and START of inputs.py)."""
    x, position = np.asarray(ids, np.int64), np.arange(len(ids))
    is_eos = np.zeros(len(x), bool) if eos_id is None else x == eos_id
    predicted = position >= (start == "given")
    later = is_eos & predicted
    counts: dict[Eos, NDArray[np.bool_]] = {
        "published": ~is_eos | (np.cumsum(is_eos) == 1),
        "first": np.cumsum(later) - later == 0,
        "all": np.ones(len(x), bool),
        "closing": ~is_eos | (position < len(x) - 1),
    }
    return counts[eos] & predicted


def generative_perplexity(
    rows: Sequence[Sequence[int]], nats: Sequence[TokenNats], eos_id: int | None, eos: Eos, start: Start
) -> GenerativePerplexity:
    """All three averages, from the nats of every token."""
    is_counted = [counted(row, eos_id, eos, start) for row in rows]
    is_summed = [np.ones(len(row), bool) for row in rows] if eos == "closing" else is_counted
    sums = np.array([row[summed].sum(dtype=np.float64) for row, summed in zip(nats, is_summed, strict=True)])
    tokens = np.array([row.sum() for row in is_counted], np.int64)
    valid = tokens > 0
    means = sums[valid] / tokens[valid]
    mean_nats = mean_of(means.tolist())
    pooled = _perplexity(None, None)
    if valid.any():
        by_sample = sums[valid][:, None]  # each sample is a document
        estimate = summarize(Nats(by_sample, by_sample, tokens[valid], exact=True))
        pooled = _perplexity(estimate.nats, estimate.over_documents)
    return GenerativePerplexity(
        pooled=pooled,
        of_mean_nats=_perplexity(mean_nats.value, mean_nats.stderr),
        mean_of_perplexities=mean_of(np.exp(means).tolist()),
        num_samples=int(valid.sum()),
        num_tokens=int(tokens.sum()),
        num_uncounted=int((~valid).sum()),
    )


def _perplexity(nats: float | None, stderr: float | None) -> JudgePerplexity:
    value = None if nats is None else float(np.exp(nats))
    return JudgePerplexity(value, None if value is None or stderr is None else value * stderr, nats, stderr)
