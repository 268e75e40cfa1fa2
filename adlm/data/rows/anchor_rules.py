"""Rules for choosing anchors, by name (`anchor.rule`), and statistics of rows: their symbols, lengths and anchors.

A rule is made once per run from the options and `SymbolStatistics`; it then maps ids to anchors at every step. It sees
ids and statistics of the training text, no networks.

Shapes: B sequences, L tokens each, V symbols. `pad` is True at padding.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.config.schema import Anchor
from adlm.data.rows.packing import Rows
from adlm.diffusion.objectives import anchor_mask
from adlm.errors import UserError
from adlm.registry import ANCHOR_RULES
from adlm.tokens import Tokenizer

WORDS = """
a about above after again against all also am among an and any are as at be because been before being below between
both but by can cannot could did do does doing down during each either else ever every few for from further had has
have having he her here hers herself him himself his how however i if in into is it its itself just least less let
many may me might more most much must my myself neither never no nor not now of off often on once one only onto or
other others our ours ourselves out over own per perhaps quite rather same shall she should since so some still such
than that the their theirs them themselves then there therefore these they this those though through thus to too
toward towards under unless until up upon us very was we were what when where whereas whether which while who whom
whose why will with within without would yet you your yours yourself yourselves s t d ll m re ve
"""
FUNCTION_WORDS = frozenset(WORDS.split())
SAMPLE = 1000  # evenly spaced rows in which frequencies and anchors are counted
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)

AnchorRule = Callable[[Tensor, Tensor | None], Tensor]
"""ids (B, L) and padding (B, L) or None -> (B, L), True at anchors, never at padding."""


@dataclass(frozen=True)
class SymbolStatistics:
    """The vocabulary, and how often each symbol occurs in a sample of the training text."""

    texts: Sequence[str]
    """The text of each symbol, with the space before it."""
    counts: Tensor
    """(V,), occurrences."""
    rows: Tensor
    """(V,), rows in which the symbol occurs."""
    num_rows: int


GetStatistics = Callable[[], SymbolStatistics]
"""Called by the rules that need statistics."""


def no_statistics() -> SymbolStatistics:
    raise UserError("this anchor.rule needs statistics of the training text, which only `adlm train` and prepare have")


def anchor_rule(anchor: Anchor, num_symbols: int, statistics: GetStatistics = no_statistics) -> AnchorRule:
    """The rule that the options name.

    One of another package always gets the padding, all False where there is none, and UserError tells if it does not
    give booleans (B, L).
    """
    rule: AnchorRule = ANCHOR_RULES[anchor.rule](anchor, num_symbols, statistics)
    if anchor.rule in ANCHOR_RULES.built_in:
        return rule

    def checked_rule(x: Tensor, pad: Tensor | None) -> Tensor:
        anchors = rule(x, torch.zeros_like(x, dtype=torch.bool) if pad is None else pad)
        if not isinstance(anchors, Tensor) or anchors.dtype != torch.bool or anchors.shape != x.shape:
            given = f"{anchors.dtype} {tuple(anchors.shape)}" if isinstance(anchors, Tensor) else type(anchors).__name__
            raise UserError(
                f"anchor.rule {anchor.rule} gave {given} for ids {tuple(x.shape)}; it must return a bool tensor of "
                "their shape, True at anchors"
            )
        return anchors

    return checked_rule


def describe_rule(anchor: Anchor) -> str:
    """Which tokens are anchors, in a few words."""
    described = {
        "count": f"at most {anchor.tau} times in the row",
        "rare": f"rarest symbols, {anchor.share:.0%} of the text",
        "frequent": f"most frequent symbols, {anchor.share:.0%} of the text",
        "tf-idf": f"highest tf-idf, {anchor.share:.0%} of the row",
        "pattern": f"matching {anchor.pattern}",
        "content": "content words",
        "random": f"random, {anchor.share:.0%} of the text",
        "syntax": "labelled names and keywords",
        "all": "every token",
    }
    return described.get(anchor.rule, anchor.rule)


def count(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """Tokens whose id occurs at most `tau` times in the sequence, as published."""
    return lambda x, pad: anchor_mask(x, anchor.tau, num_symbols, pad)


def every(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """All tokens."""
    return lambda x, pad: torch.ones_like(x, dtype=torch.bool) if pad is None else ~pad


def rare(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """The rarest symbols of the training text, which together make up `share` of its tokens."""
    counts = statistics().counts.double()
    return _of_symbols(_first_share(counts, counts, anchor.share))


def frequent(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """The most frequent symbols of the training text, which together make up `share` of its tokens."""
    counts = statistics().counts.double()
    return _of_symbols(_first_share(counts, -counts, anchor.share))


def _first_share(counts: Tensor, order: Tensor, share: float) -> Tensor:
    """(V,), True at the first symbols by `order` up to the one at which they reach `share` of all occurrences."""
    by_order = order.argsort(stable=True)
    before = counts[by_order].cumsum(dim=0) - counts[by_order]
    return torch.zeros(len(counts), dtype=torch.bool).scatter(0, by_order, before < share * counts.sum())


def tf_idf(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """The `share` of a sequence's tokens with the highest tf-idf: occurrences in it * log(rows / rows with the id)."""
    found = statistics()
    idf = torch.log((1 + found.num_rows) / (1 + found.rows.float()))
    by_device: dict[torch.device, Tensor] = {}

    def rule(x: Tensor, pad: Tensor | None) -> Tensor:
        text = torch.ones_like(x, dtype=torch.bool) if pad is None else ~pad
        occurrences = torch.zeros(len(x), num_symbols, device=x.device).scatter_add(1, x, text.float())
        scores = (occurrences * by_device.setdefault(x.device, idf.to(x.device))).gather(1, x)
        place = scores.masked_fill(~text, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return text & (place < anchor.share * text.sum(dim=1, keepdim=True))

    return rule


def pattern(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """Symbols whose text, without spaces around it, matches the regular expression `pattern` as a whole."""
    if not anchor.pattern:
        raise UserError("anchor.rule pattern needs anchor.pattern, a regular expression such as law|order or [A-Z].*")
    try:
        expression = re.compile(anchor.pattern)
    except re.error as error:
        raise UserError(f"anchor.pattern {anchor.pattern!r} is not a regular expression: {error}") from None
    matches = [bool(expression.fullmatch(text.strip())) for text in statistics().texts]
    if not any(matches):
        raise UserError(f"anchor.pattern {anchor.pattern!r} matches no symbol of the vocabulary; give another")
    return _of_symbols(torch.tensor(matches))


def content(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """Content words: symbols with letters or digits that are not English function words."""
    words = (text.strip().lower() for text in statistics().texts)
    return _of_symbols(torch.tensor([any(map(str.isalnum, word)) and word not in FUNCTION_WORDS for word in words]))


def random(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """A `share` of all tokens, pseudorandom: chosen by the position and all ids of the sequence."""
    threshold = round(anchor.share * 2**31)

    def rule(x: Tensor, pad: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        key = (x * (2 * positions + 1)).sum(dim=1, keepdim=True)
        chosen = _mixed(_mixed(key) + positions) < threshold
        return chosen if pad is None else chosen & ~pad

    return rule


def syntax(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """The tokens that a prepared folder labels. Batches carry them, so this is called only where there are none."""

    def rule(x: Tensor, pad: Tensor | None) -> Tensor:
        raise UserError(
            "anchor.rule syntax reads labels of the training text, and here there are none; prepare the text with "
            "data.labels=python, or use another rule"
        )

    return rule


def _mixed(numbers: Tensor) -> Tensor:
    """Integers from 0 to 2^31 - 1 in which every bit depends on every bit of the numbers."""
    for factor in (0x7FEB352D, 0x46CA68B7):
        numbers = (((numbers ^ (numbers >> 16)) & 0x7FFFFFFF) * factor) & 0x7FFFFFFF
    return numbers ^ (numbers >> 16)


def _of_symbols(is_anchor: Tensor) -> AnchorRule:
    """A rule that looks at each token alone; is_anchor (V,)."""
    by_device: dict[torch.device, Tensor] = {}

    def rule(x: Tensor, pad: Tensor | None) -> Tensor:
        chosen = by_device.setdefault(x.device, is_anchor.to(x.device))[x]
        return chosen if pad is None else chosen & ~pad

    return rule


@dataclass(frozen=True)
class Statistics:
    num_rows: int
    num_documents: int
    num_tokens: int
    document_lengths: tuple[int, ...]
    """Quantiles of the number of tokens per document: minimum, 10%, median, 90%, maximum."""
    sampled_tokens: int
    """Number of tokens in the sampled rows, to which the following fields refer."""
    distinct: int
    """Number of different ids."""
    most_frequent: tuple[tuple[int, float], ...]
    """The most frequent ids with their relative frequencies."""
    anchors: float
    """Fraction of tokens that are anchors."""
    padding: float
    """Fraction of positions that are padding."""


def statistics_of(rows: Rows, rule: AnchorRule | None, top: int = 12) -> Statistics:
    """`rule` None takes labelled tokens as anchors."""
    x, pad = rows.read(_sample(rows))
    text = np.ones_like(x, bool) if pad is None else ~pad
    ids, counts = np.unique(x[text], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:top]
    extent = rows.tokens.extent
    lengths = np.diff(np.asarray(rows.tokens.ends, np.int64), prepend=0)
    quantiles = np.quantile(lengths, QUANTILES, method="nearest") if len(lengths) else ()
    return Statistics(
        num_rows=len(rows),
        num_documents=extent.documents,
        num_tokens=extent.tokens,
        document_lengths=tuple(int(value) for value in quantiles),
        sampled_tokens=int(text.sum()),
        distinct=len(ids),
        most_frequent=tuple((int(ids[i]), float(counts[i] / counts.sum())) for i in order),
        anchors=float(anchors_in(rows, _sample(rows), rule)[text].mean()),
        padding=float(1 - text.mean()),
    )


def _sample(rows: Rows) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))


def anchors_in(rows: Rows, numbers: Sequence[int] | NDArray[np.int64], rule: AnchorRule | None) -> NDArray[np.bool_]:
    """(n, L), True at anchors of rows, which are the labelled tokens if `rule` is None; False at padding.

    Processes 32 rows at a time: rules may need (rows, V) numbers.
    """
    if rule is None:
        labels = rows.labels(numbers)
        assert labels is not None
        return labels
    x, pad = rows.read(numbers)
    padding = np.zeros_like(x, bool) if pad is None else pad
    masks = [
        rule(torch.from_numpy(x[i : i + 32]), torch.from_numpy(padding[i : i + 32])).numpy()
        for i in range(0, len(x), 32)
    ]
    return np.concatenate(masks)


def count_symbols(batches: Iterable[tuple[Tensor, Tensor | None]], num_symbols: int) -> tuple[Tensor, Tensor, int]:
    """How often each symbol occurs (V,), in how many rows (V,), and the number of rows, of batches x (B, L) and pad."""
    counts, rows, num_rows = torch.zeros(num_symbols), torch.zeros(num_symbols), 0
    for x, pad in batches:
        row_and_symbol = x + num_symbols * torch.arange(len(x))[:, None]
        found, times = row_and_symbol[... if pad is None else ~pad].unique(return_counts=True)  # type: ignore[no-untyped-call]
        counts += torch.bincount(found % num_symbols, times, num_symbols)
        rows += torch.bincount(found % num_symbols, minlength=num_symbols)
        num_rows += len(x)
    return counts, rows, num_rows


def symbol_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of every symbol, with the space before it."""
    return [tokenizer.piece(index).decode(errors="replace") for index in range(tokenizer.vocabulary.size)]


def symbol_statistics(rows: Rows, tokenizer: Tokenizer) -> SymbolStatistics:
    """Counted in evenly spaced rows."""
    x, pad = rows.read(_sample(rows))
    batch = torch.from_numpy(x), None if pad is None else torch.from_numpy(pad)
    return SymbolStatistics(symbol_texts(tokenizer), *count_symbols([batch], tokenizer.vocabulary.size))
