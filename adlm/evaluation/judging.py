"""Generative perplexity: what a judge, a causal language model, pays for texts that it did not write. Knows no files.

The judge reads ids of its own, the first of which is given and never counted. A text longer than the judge's context is
read in windows that overlap by half, so that every other token is predicted exactly once.

Shapes: B windows of L ids; `pad` is True past the end of one. A sample is n ids and has n nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.errors import UserError
from adlm.evaluation import likelihood
from adlm.evaluation.generation import Mean, mean_of

Nats = NDArray[np.float32]
Eos = Literal["published", "first", "all"]
Start = Literal["given", "bos"]

# Which tokens count, by name; the first of the ids, which is given, never does.
EOS: dict[Eos, str] = {
    "published": "every token that is not eos, and the first eos (of a text that begins with one, no other)",
    "first": "up to the first eos after the first token, and it",
    "all": "every token, each eos too",
}
START: dict[Start, str] = {
    "given": "the text's first token is given and not counted, as published",
    "bos": "the judge's bos is put before the text, and every token of the text counts",
}


@dataclass(frozen=True)
class About:
    """Which judge it is."""

    name: str
    kind: str
    """hugging-face or adlm."""
    weights: str
    """sha256 of its weights."""
    tokenizer: str
    tokenizer_sha256: str
    """Ids of a tokenizer with the same one can be read as they are."""
    context: int
    """The most tokens it reads at once."""
    bos_id: int | None
    eos_id: int | None
    device: str
    dtype: str


class Judge(Protocol):
    """Whoever can say what each token of a text costs after those before it."""

    @property
    def about(self) -> About: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The judge's ids for texts, in which bos and eos may be written out."""
        ...

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        """(B, L), -log p(x_i | what is before it in the window); 0 at the first token and at padding."""
        ...


class Window(NamedTuple):
    sample: int
    start: int
    stop: int
    new: int
    """From here on its nats are wanted; what is before is context."""


@dataclass(frozen=True)
class Perplexity:
    """exp of nats a token, with the standard error that the nats' own gives it (exp' = exp)."""

    value: float | None
    stderr: float | None
    nats: float | None
    nats_stderr: float | None


@dataclass(frozen=True)
class GenerativePerplexity:
    """The field's conventions side by side; none leaves a sample out that has a token to count."""

    pooled: Perplexity
    """exp(sum nats / sum tokens): long samples weigh more. The published figure."""
    of_mean_nats: Perplexity
    """exp(mean over samples of nats a token): every sample weighs the same."""
    mean_of_perplexities: Mean
    """mean over samples of exp(nats a token): ruled by the worst samples."""
    num_samples: int
    num_tokens: int
    num_uncounted: int
    """Samples in which no token counts: empty, or of one token that is given."""


def rows_of(judge: Judge, rows: Sequence[Sequence[int]], start: Start, longest: int | None) -> list[list[int]]:
    """The ids the judge reads: perhaps bos, then the text's, at most `longest` of these."""
    about = judge.about
    if start == "bos" and about.bos_id is None:
        raise UserError(f"--start bos: the judge {about.name} has no bos token; use --start given")
    before = [about.bos_id] if start == "bos" and about.bos_id is not None else []
    return [before + list(row[:longest]) for row in rows]


def check_context(context: int) -> None:
    if context < 2:
        raise UserError(f"--context {context} is too short: a token is predicted from at least one before it; give 2")


def windows_of(sample: int, num: int, context: int) -> list[Window]:
    """Windows of at most `context` tokens; each but the first reads half a context again before what is new to it."""
    check_context(context)
    windows: list[Window] = []
    seen = 1  # the first token is given
    while seen < num:
        start = 0 if not windows else seen - context // 2
        stop = min(start + context, num)
        windows.append(Window(sample, start, stop, seen))
        seen = stop
    return windows


@torch.no_grad()
def token_nats(judge: Judge, rows: Sequence[Sequence[int]], batch: int, context: int | None = None) -> list[Nats]:
    """What each token of each row costs; 0 for the first, and for a row of fewer than two."""
    nats = [np.zeros(len(row), np.float32) for row in rows]
    context = judge.about.context if context is None else context
    windows = [window for number, row in enumerate(rows) for window in windows_of(number, len(row), context)]
    windows.sort(key=lambda window: window.stop - window.start)  # equal lengths side by side: little padding
    for first in range(0, len(windows), batch):
        together = windows[first : first + batch]
        x, pad = _side_by_side([rows[window.sample][window.start : window.stop] for window in together])
        for window, its_nats in zip(together, judge.nats(x, pad).cpu().numpy(), strict=True):
            new = slice(window.new - window.start, window.stop - window.start)
            nats[window.sample][window.new : window.stop] = its_nats[new]
    _refuse_no_numbers(judge, nats)
    return nats


def _side_by_side(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows filled up on the right, where a causal model does not look."""
    width = max(len(row) for row in rows)
    x, pad = torch.zeros(len(rows), width, dtype=torch.int64), torch.ones(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        x[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        pad[number, : len(row)] = False
    return x, pad


def _refuse_no_numbers(judge: Judge, nats: Sequence[Nats]) -> None:
    for row in nats:
        if not np.isfinite(row).all():
            where = int(np.flatnonzero(~np.isfinite(row))[0])
            raise UserError(
                f"the judge {judge.about.name} gives {row[where]} nats for token {where} of a text, which is no "
                "likelihood: its weights are damaged, or it cannot read this text; give another --model"
            )


def counted(ids: Sequence[int], eos_id: int | None, eos: Eos) -> NDArray[np.bool_]:
    """Which tokens count (see EOS); never the first."""
    x = np.asarray(ids, np.int64)
    is_eos = np.zeros(len(x), bool) if eos_id is None else x == eos_id
    later = is_eos & (np.arange(len(x)) > 0)
    counts: dict[Eos, NDArray[np.bool_]] = {
        "published": ~is_eos | (np.cumsum(is_eos) == 1),
        "first": np.cumsum(later) - later == 0,
        "all": np.ones(len(x), bool),
    }
    return counts[eos] & (np.arange(len(x)) > 0)


def generative_perplexity(
    rows: Sequence[Sequence[int]], nats: Sequence[Nats], eos_id: int | None, eos: Eos
) -> GenerativePerplexity:
    """All conventions, from what every token costs."""
    counts = [counted(row, eos_id, eos) for row in rows]
    sums = np.array([its[chosen].sum(dtype=np.float64) for its, chosen in zip(nats, counts, strict=True)])
    tokens = np.array([chosen.sum() for chosen in counts], np.int64)
    some = tokens > 0
    means = sums[some] / tokens[some]
    pooled = _pooled(sums[some], tokens[some])
    each = mean_of(means.tolist())
    return GenerativePerplexity(
        pooled=pooled,
        of_mean_nats=_perplexity(each.value, each.stderr),
        mean_of_perplexities=mean_of(np.exp(means).tolist()),
        num_samples=int(some.sum()),
        num_tokens=int(tokens.sum()),
        num_uncounted=int((~some).sum()),
    )


def _pooled(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> Perplexity:
    """sum nats / sum tokens, every sample a document."""
    if not len(nats):
        return _perplexity(None, None)
    by_sample = nats[:, None]
    found = likelihood.estimate(likelihood.Nats(by_sample, by_sample, tokens, exact=True))
    return _perplexity(found.nats, found.over_documents)


def _perplexity(nats: float | None, stderr: float | None) -> Perplexity:
    value = None if nats is None else float(np.exp(nats))
    return Perplexity(value, None if value is None or stderr is None else value * stderr, nats, stderr)
