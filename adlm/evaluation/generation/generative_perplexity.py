"""Generative perplexity: what a judge, a causal language model, pays for texts that it did not write. Knows no files.

A text is read by one of two conventions (START): its first token is given and not counted, as published for judges of
the hub; or every window of it begins with the judge's bos, as every row of our own models does in training. A text
longer than the judge's context is read in windows that overlap by half, so that every token is predicted exactly once.

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
from adlm.evaluation.generation.diversity import Mean, mean_of
from adlm.likelihood import estimate as likelihood

TokenNats = NDArray[np.float32]
Eos = Literal["published", "first", "all", "closing"]
Start = Literal["given", "bos"]

# Which tokens count, by name; a first token that is given never does.
EOS: dict[Eos, str] = {
    "published": "every token that is not eos, and the first eos (of a text that begins with one, no other)",
    "first": "up to the first eos after the first token, and it",
    "all": "every token, each eos too",
    "closing": "every token but an eos that ends the text, whose nats are added and which is not counted",
}
START: dict[Start, str] = {
    "given": "the text's first token is given and not counted, as published",
    "bos": "every window begins with the judge's bos, as in its training, and every token of the text counts",
}


@dataclass(frozen=True)
class JudgeInfo:
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
    framed: bool = False
    """Whether every row of its training was [bos] ... [eos], so that it expects eos at the end of its context."""


class Judge(Protocol):
    """Whoever can say what each token of a text costs after those before it."""

    @property
    def about(self) -> JudgeInfo: ...

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


@dataclass(frozen=True)
class WindowLayout:
    """How texts are laid out for a judge."""

    bos_id: int | None
    """What every window begins with; None where a text's first token is given instead."""
    room: int
    """The most tokens of a text in a window."""
    closing_id: int | None
    """An eos that may follow the last of them, at the end of the context where the judge expects it."""


def scoring_convention(about: JudgeInfo, start: Start | None, eos: Eos | None) -> tuple[Start, Eos]:
    """What was asked for, or for judges of ours the way they were trained, for those of the hub the published one."""
    if start == "bos" and about.bos_id is None:
        raise UserError(f"--start bos: the judge {about.name} has no bos token; use --start given")
    return start or ("bos" if about.framed else "given"), eos or ("closing" if about.framed else "published")


def window_layout(about: JudgeInfo, start: Start, context: int) -> WindowLayout:
    framed = start == "bos" and about.framed
    room = context - (start == "bos") - framed
    least = 1 if start == "bos" else 2
    if room < least:
        raise UserError(
            f"--context {context} is too short: a token is predicted from at least one before it; give "
            f"{least + context - room}"
        )
    return WindowLayout(about.bos_id if start == "bos" else None, room, about.eos_id if framed else None)


def truncate_texts(rows: Sequence[Sequence[int]], reading: WindowLayout, longest: int | None) -> list[list[int]]:
    """The texts' ids, at most `longest` of each; a bos that a text brings along is the window's."""
    brought = [bool(row) and reading.bos_id is not None and row[0] == reading.bos_id for row in rows]
    return [list(row[int(has) :][:longest]) for row, has in zip(rows, brought, strict=True)]


def split_into_windows(sample: int, row: Sequence[int], reading: WindowLayout) -> list[Window]:
    """Windows of at most `room` tokens; each but the first reads half of that again before what is new to it."""
    closed = len(row) > 0 and reading.closing_id is not None and row[-1] == reading.closing_id
    num = len(row) - closed
    windows: list[Window] = []
    seen = 0 if reading.bos_id is not None else 1  # a first token that is given is not predicted
    while seen < num or (closed and not windows):
        start = 0 if not windows else seen - reading.room // 2
        stop = min(start + reading.room, num)
        windows.append(Window(sample, start, stop, seen))
        seen = max(stop, 1)
    if closed:
        windows[-1] = windows[-1]._replace(stop=len(row))
    return windows


@torch.no_grad()
def token_nats(judge: Judge, rows: Sequence[Sequence[int]], batch: int, reading: WindowLayout) -> list[TokenNats]:
    """What each token of each row costs; 0 for a first token that is given."""
    nats = [np.zeros(len(row), np.float32) for row in rows]
    windows = [window for number, row in enumerate(rows) for window in split_into_windows(number, row, reading)]
    windows.sort(key=lambda window: window.stop - window.start)  # equal lengths side by side: little padding
    bos = [] if reading.bos_id is None else [reading.bos_id]
    for first in range(0, len(windows), batch):
        together = windows[first : first + batch]
        x, pad = _side_by_side([[*bos, *rows[window.sample][window.start : window.stop]] for window in together])
        for window, its_nats in zip(together, judge.nats(x, pad).cpu().numpy(), strict=True):
            new = slice(len(bos) + window.new - window.start, len(bos) + window.stop - window.start)
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


def _refuse_no_numbers(judge: Judge, nats: Sequence[TokenNats]) -> None:
    for row in nats:
        if not np.isfinite(row).all():
            where = int(np.flatnonzero(~np.isfinite(row))[0])
            raise UserError(
                f"the judge {judge.about.name} gives {row[where]} nats for token {where} of a text, which is no "
                "likelihood: its weights are damaged, or it cannot read this text; give another --model"
            )


def counted(ids: Sequence[int], eos_id: int | None, eos: Eos, start: Start) -> NDArray[np.bool_]:
    """Which tokens count (see EOS and START)."""
    x, place = np.asarray(ids, np.int64), np.arange(len(ids))
    is_eos = np.zeros(len(x), bool) if eos_id is None else x == eos_id
    predicted = place >= (start == "given")
    later = is_eos & predicted
    counts: dict[Eos, NDArray[np.bool_]] = {
        "published": ~is_eos | (np.cumsum(is_eos) == 1),
        "first": np.cumsum(later) - later == 0,
        "all": np.ones(len(x), bool),
        "closing": ~is_eos | (place < len(x) - 1),
    }
    return counts[eos] & predicted


def generative_perplexity(
    rows: Sequence[Sequence[int]], nats: Sequence[TokenNats], eos_id: int | None, eos: Eos, start: Start
) -> GenerativePerplexity:
    """All averages, from what every token costs."""
    counts = [counted(row, eos_id, eos, start) for row in rows]
    paid = [np.ones(len(row), bool) for row in rows] if eos == "closing" else counts
    sums = np.array([its[chosen].sum(dtype=np.float64) for its, chosen in zip(nats, paid, strict=True)])
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
    found = likelihood.summarize(likelihood.Nats(by_sample, by_sample, tokens, exact=True))
    return _perplexity(found.nats, found.over_documents)


def _perplexity(nats: float | None, stderr: float | None) -> Perplexity:
    value = None if nats is None else float(np.exp(nats))
    return Perplexity(value, None if value is None or stderr is None else value * stderr, nats, stderr)
