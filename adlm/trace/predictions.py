"""What the networks expected when a frame's tokens were drawn. Knows a model by its calls, nothing of pages.

Shapes: L tokens, n masks, V symbols, k guesses.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame

GUESSES = 5

Guesses = tuple[tuple[int, float], ...]
"""Ids with their probabilities, the likeliest first."""


@dataclass(frozen=True)
class Predictions:
    """Log probabilities of the clean token at the masks of what was read."""

    places: tuple[int, ...]
    """The n masks that are predicted: all or, from left to right, the first."""
    denoiser: Tensor
    """(n, V)"""
    anchor: Tensor | None
    """(n, V), nothing where there is no anchor network."""

    def best_anchors(self) -> dict[int, int]:
        """The anchor network's first guess at each place."""
        return {} if self.anchor is None else _best(self.places, self.anchor)


def predict(lm: LanguageModel, frame: Frame, row: int) -> Predictions:
    """What the networks expected at the masks of what they read, and were told, for a row: a call of each."""
    seen, rows, places = _asked(lm, frame.read[row])
    alpha = _told(frame, row)
    return Predictions(places, lm.log_probs(seen, alpha)[0, rows].float().cpu(), _anchor(lm, seen, alpha, rows))


def anchors_of(lm: LanguageModel, frame: Frame, row: int) -> dict[int, int]:
    """The anchor network's first guess at each of those masks, without the denoiser; empty where there is none."""
    seen, rows, places = _asked(lm, frame.read[row])
    anchor = _anchor(lm, seen, _told(frame, row), rows)
    return {} if anchor is None else _best(places, anchor)


def top(log_probs: Tensor) -> list[Guesses]:
    """The likeliest few of each row of (n, V), to three digits."""
    best = log_probs.float().exp().topk(min(GUESSES, log_probs.shape[-1]), dim=-1)
    return [
        tuple((index, float(f"{probability:.3g}")) for index, probability in zip(ids, probabilities, strict=True))
        for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def guesses(log_probs: Tensor | None, places: tuple[int, ...], wanted: Iterable[int]) -> dict[int, Guesses]:
    """The likeliest few at the wanted places, of those that are predicted."""
    if log_probs is None:
        return {}
    row_of = {place: row for row, place in enumerate(places)}
    kept = [place for place in wanted if place in row_of]
    return dict(zip(kept, top(log_probs[[row_of[place] for place in kept]]), strict=True))


def _asked(lm: LanguageModel, z: Tensor) -> tuple[Tensor, list[int], tuple[int, ...]]:
    """What the networks are shown (1, l), the rows of their answer, and the places in z that those are about.

    From left to right an answer is about the place after it.
    """
    masks = (z == lm.mask_id).nonzero().flatten().tolist()
    if masks and lm.left_to_right:
        return z[None, : masks[0]], [masks[0] - 1], (masks[0],)
    return z[None], masks, tuple(masks)


def _told(frame: Frame, row: int) -> float | None:
    return None if frame.alpha is None else float(frame.alpha[row])


def _anchor(lm: LanguageModel, seen: Tensor, alpha: float | None, rows: list[int]) -> Tensor | None:
    try:
        return lm.anchor_logits(seen, alpha)[0, rows].float().log_softmax(-1).cpu()
    except UserError:  # the method has no anchor network
        return None


def _best(places: tuple[int, ...], log_probs: Tensor) -> dict[int, int]:
    return dict(zip(places, log_probs.argmax(-1).tolist(), strict=True))
