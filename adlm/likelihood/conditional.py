"""Bounds on -log p(continuation | context), and whether the continuation is what greedy decoding gives. No texts.

Neither the other rows nor the batch size change a result, except for rounding (`conditional_noise` has the masks).

Shapes: B rows of L tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.conditional_noise import Noise, noise_model
from adlm.likelihood.settings import BATCH_TOKENS, BATCH_TOKENS_ON_GPU
from adlm.methods import method_of
from adlm.methods.block_causal import BlockCausal
from adlm.methods.inputs import eval_mode, vocabulary_of
from adlm.methods.masked_diffusion import BoundNoise, NoisedBatch, as_denoiser
from adlm.methods.method import Method
from adlm.sampling.adaptive import SCORE_RESOLUTION
from adlm.sampling.frame import NoisyRows

Score = Literal["bound", "left-to-right", "causal"]
HEAD_ROWS = 2**10  # positions whose beliefs (N, V) are held at once: 200 MB for 50,000 symbols


@dataclass(frozen=True)
class ConditionalRow:
    """A row: ids that are given, beginning with bos if the vocabulary has one, and the ids after them to score."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    after: tuple[int, ...] = ()
    """Ids after the continuation that are given too, of methods that read both sides: infilling."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.continuation + self.after


@dataclass(frozen=True)
class ConditionalNats:
    """The score of one row."""

    nats: float
    """An upper bound on -log p(continuation | context), estimated; exact for causal methods."""
    greedy: bool
    """Whether greedy decoding gives the continuation; see `is_greedy`. False if the settings leave it out."""
    num_tokens: int
    errors: tuple[float, ...] = ()
    """Monte Carlo errors of `nats` by stratum; none for causal methods, and where all masks were enumerated."""

    @property
    def stderr(self) -> float:
        return math.hypot(*self.errors)

    def gap_stderr(self, other: "ConditionalNats") -> float:
        """Standard error of the difference. Continuations of one length share their masks, so their errors do too."""
        if (self.num_tokens, len(self.errors)) == (other.num_tokens, len(other.errors)):
            return math.dist(self.errors, other.errors)
        return math.hypot(self.stderr, other.stderr)


@dataclass(frozen=True)
class ConditionalSettings:
    """The options of a measurement."""

    samples: int = 64
    """Noisy versions of every continuation, an even number: their differences in pairs give the standard error."""
    seed: int = 0
    batch: int | None = None
    """Rows per forward pass; by default about 8,192 tokens, on a GPU 32,768. Does not change the results."""
    score: Score = "bound"
    """Of block-causal methods: the bound, or a likelihood that is exact, of sampling each block from left to right or
    of the causal model. Greedy decoding is then that of the causal model, or from left to right."""
    greedy: bool = True
    """Whether `ConditionalNats.greedy` is computed where it takes network calls of its own."""

    def __post_init__(self) -> None:
        if self.samples < 2 or self.samples % 2:
            raise UserError(f"samples {self.samples} must be an even number, at least 2; try 64")
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch {self.batch} must be at least 1")

    def rows_at_once(self, width: int, device: torch.device) -> int:
        tokens = BATCH_TOKENS_ON_GPU if device.type == "cuda" else BATCH_TOKENS
        return self.batch or max(1, tokens // width)


@torch.no_grad()
def conditional_nats(
    method: Method,
    network: Any,
    rows: Sequence[ConditionalRow],
    settings: ConditionalSettings,
    report_progress: Callable[[int], None] = lambda done: None,
) -> list[ConditionalNats]:
    """The score of every row. `report_progress(num)` is called as rows are finished; `num` is how many."""
    config = method.config  # padding is excluded from attention: a row is scored as it would be alone
    method = method_of(replace(config, data=replace(config.data, pad="masked")))
    frozen = FrozenNetwork(network, dtype=next(network.parameters()).dtype, graphs=False)
    if method.exact or (isinstance(method, BlockCausal) and settings.score != "bound"):
        return _exact_nats(method, frozen, rows, settings, report_progress)
    model, mask_id = noise_model(method), vocabulary_of(method.config).mask_id
    filling, device = vocabulary_of(method.config).padding_id, next(network.parameters()).device
    period = method.config.model.block_length or 1  # where in a text block a continuation begins
    draw = cache(lambda start, num: model.draw(start, num, settings.samples, settings.seed))
    noises = {
        index: draw(1 + (len(row.context) - 1) % period, len(row.continuation))
        for index, row in enumerate(rows)
        if row.continuation
    }
    nats = {index: torch.zeros(len(noise.masked), dtype=torch.float64) for index, noise in noises.items()}
    num_versions = [len(nats[index]) if index in nats else 0 for index in range(len(rows))]
    for parts in _parts(rows, num_versions, lambda width: settings.rows_at_once(width, device)):
        batch = _row_batch([rows[part.row] for part in parts for _ in range(part.start, part.stop)], filling, device)
        versions = [noises[part.row].versions(part.start, part.stop) for part in parts]
        with eval_mode(network):
            scored = model.nats(network, batch.x, _noise_batch(batch, versions, mask_id), batch.pad)
        sums = torch.split((scored * batch.scored).sum(dim=1).cpu(), [part.stop - part.start for part in parts])
        for part, values in zip(parts, sums, strict=True):
            nats[part.row][part.start : part.stop] = values
        report_progress(sum(part.stop == len(nats[part.row]) for part in parts))
    if not settings.greedy:
        greedy = [False] * len(rows)
    elif isinstance(method, BlockCausal):
        from_left = replace(settings, score="left-to-right")
        greedy = [result.greedy for result in _exact_nats(method, frozen, rows, from_left, lambda done: None)]
    else:
        greedy = is_greedy(method, frozen, rows, settings)
    results = [ConditionalNats(0.0, True, 0)] * len(rows)
    for index, noise in noises.items():
        mean, errors = noise.estimate(nats[index])
        results[index] = ConditionalNats(mean, greedy[index], len(rows[index].continuation), errors)
    return _check_finite(results)


@torch.no_grad()
def is_greedy(
    method: Method, frozen: FrozenNetwork, rows: Sequence[ConditionalRow], settings: ConditionalSettings
) -> list[bool]:
    """Whether revealing the continuation one token at a time, always the most probable one, gives its tokens.

    This is the sampler `confidence` at temperature 0 with one token a step. A row ends at its first other token.
    """
    mask_id, filling = vocabulary_of(method.config).mask_id, vocabulary_of(method.config).padding_id
    device = frozen.embedding.device
    denoise = as_denoiser(frozen, mask_id, method.conditioning_sigma)
    greedy = [True] * len(rows)
    num_parts = [1 if row.continuation else 0 for row in rows]
    for parts in _parts(rows, num_parts, lambda width: settings.rows_at_once(width, device)):
        batch = _row_batch([rows[part.row] for part in parts], filling, device)
        x, pad = batch.x, batch.pad
        z = x.masked_fill(batch.scored, mask_id)
        alive = torch.arange(len(x), device=device)  # rows without another token so far that still have masks
        while len(alive) > 0:
            masked = z[alive] == mask_id
            positions = masked.flatten().nonzero()[:, 0]
            output = denoise(NoisyRows(z[alive], pad=None if pad is None else pad[alive]))
            score = torch.full(masked.shape, -torch.inf, dtype=torch.float64, device=device)
            token = torch.full(masked.shape, mask_id, device=device)
            for chunk in torch.split(positions, HEAD_ROWS):
                best = output.log_beliefs(chunk).max(dim=-1)
                score.view(-1)[chunk] = (best.values.double().exp() / SCORE_RESOLUTION).round()
                token.view(-1)[chunk] = best.indices
            column = score.argsort(dim=1, descending=True, stable=True)[:, :1]  # the leftmost of equal scores
            revealed = token.gather(1, column)
            equal = (revealed == x[alive].gather(1, column))[:, 0]
            for index in alive[~equal].tolist():
                greedy[parts[index].row] = False
            z[alive] = z[alive].scatter(1, column, revealed)
            alive = alive[equal]
            alive = alive[(z[alive] == mask_id).any(dim=1)]
    return greedy


def _exact_nats(
    method: Method,
    frozen: FrozenNetwork,
    rows: Sequence[ConditionalRow],
    settings: ConditionalSettings,
    report_progress: Callable[[int], None],
) -> list[ConditionalNats]:
    """Exact nats; a first token without context is given, as in `Causal.predicted`."""
    vocabulary, device = vocabulary_of(method.config), frozen.embedding.device
    results = [ConditionalNats(0.0, True, 0)] * len(rows)
    num_parts = [1 if row.continuation and len(row.ids) > 1 else 0 for row in rows]
    for parts in _parts(rows, num_parts, lambda width: settings.rows_at_once(width, device)):
        batch = _row_batch([rows[part.row] for part in parts], vocabulary.padding_id, device)
        nats = torch.zeros(batch.x.shape, dtype=torch.float64, device=device)
        differs = torch.zeros(batch.x.shape, dtype=torch.bool, device=device)
        for hidden, scored in _exact_passes(method, frozen, batch, settings.score):
            for chunk in torch.split(scored.flatten().nonzero()[:, 0], HEAD_ROWS):
                log_beliefs = frozen.log_beliefs(hidden.flatten(0, 1)[chunk], vocabulary.mask_id)
                target = batch.x.flatten()[chunk]
                nats.view(-1)[chunk] = -log_beliefs.gather(1, target[:, None])[:, 0].double()
                differs.view(-1)[chunk] = log_beliefs.argmax(dim=1) != target
        sums, greedy = nats.sum(dim=1).tolist(), (~differs.any(dim=1)).tolist()
        for part, total, equal in zip(parts, sums, greedy, strict=True):
            results[part.row] = ConditionalNats(total, equal, len(rows[part.row].continuation))
        report_progress(len(parts))
    return _check_finite(results)


def _exact_passes(
    method: Method, frozen: FrozenNetwork, batch: "RowBatch", score: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (B, L, d) that predict each token, and where they do; the first token of a row is given."""
    x, scored = batch.x, batch.scored.clone()
    scored[:, 0] = False
    if not isinstance(method, BlockCausal):
        hidden = frozen.hidden(x[:, :-1]).last  # padding is last, where a causal network never looks
        yield F.pad(hidden, (0, 0, 1, 0)), scored
    elif score == "causal":
        yield frozen.block_hidden(x, x, batch.pad)[1], scored
    else:
        for noised, where in method.left_to_right_passes(x, batch.pad):
            yield frozen.block_hidden(x, noised.z, batch.pad, noised.stale)[0].last, where & scored


@dataclass(frozen=True)
class RowVersions:
    """Versions `start` to `stop` of a row, in one batch."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowBatch:
    """Rows padded on the right to one length."""

    x: Tensor
    """(B, L), clean ids."""
    scored: Tensor
    """(B, L), True at continuations."""
    pad: Tensor | None
    """(B, L), True at padding; None if there is none."""


def _parts(
    rows: Sequence[ConditionalRow], num_versions: Sequence[int], rows_at_once: Callable[[int], int]
) -> Iterator[list[RowVersions]]:
    """Batches of all versions of all rows, the longest first, so that a batch has little padding.

    Every batch but the last has `rows_at_once(width)` rows, where width is the length of its longest.
    """
    batch: list[RowVersions] = []
    num = room = 0
    for row in sorted(range(len(rows)), key=lambda row: -len(rows[row].ids)):
        start = 0
        while start < num_versions[row]:
            if not batch:
                num, room = 0, rows_at_once(len(rows[row].ids))
            stop = min(num_versions[row], start + room - num)
            batch.append(RowVersions(row, start, stop))
            num, start = num + stop - start, stop
            if num == room:
                yield batch
                batch = []
    if batch:
        yield batch


def _row_batch(rows: Sequence[ConditionalRow], filling: int, device: torch.device) -> RowBatch:
    width = max(len(row.ids) for row in rows)
    x = torch.full((len(rows), width), filling)
    scored, pad = torch.zeros(x.shape, dtype=torch.bool), torch.ones(x.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.ids)
        x[index, :length] = torch.tensor(row.ids)
        scored[index, len(row.context) : length - len(row.after)] = True
        pad[index, :length] = False
    return RowBatch(x.to(device), scored.to(device), pad.to(device) if pad.any() else None)


def _noise_batch(batch: RowBatch, noises: Sequence[Noise], mask_id: int) -> BoundNoise:
    """The noise of all rows of a batch, in their order. Times stay on the host."""

    def noisy(masks: Sequence[Tensor]) -> Tensor:
        """x with the masks of each row in its continuation."""
        masked = torch.zeros_like(batch.scored)
        masked[batch.scored] = torch.cat([mask.flatten() for mask in masks]).to(masked.device)
        return batch.x.masked_fill(masked, mask_id)

    def weights() -> Tensor:
        """(B,), or (B, L) with the weight of every token of the continuations."""
        if noises[0].weight.ndim == 1:
            return torch.cat([noise.weight for noise in noises])
        at_tokens = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
        at_tokens[batch.scored] = torch.cat([noise.weight.flatten() for noise in noises]).to(at_tokens.device)
        return at_tokens

    steps = [noise.s for noise in noises if noise.s is not None]
    starts = [noise.start for noise in noises if noise.start is not None]
    t, z = torch.cat([noise.t for noise in noises]), noisy([noise.masked for noise in noises])
    return BoundNoise(
        NoisedBatch(z, t, torch.cat(steps) if steps else None),
        weights(),
        noisy(starts) if starts else None,
    )


def _check_finite(results: list[ConditionalNats]) -> list[ConditionalNats]:
    if not all(math.isfinite(result.nats) for result in results):
        raise UserError(
            "the model's nats are not finite: its weights are damaged, or its logits are too large for their "
            "precision; measure another model"
        )
    return results
