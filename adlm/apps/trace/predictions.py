"""The predictions of the networks from which the tokens of a frame were drawn. No display.

Shapes: n masks, V symbols.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame

NUM_GUESSES = 5

Guesses = tuple[tuple[int, float], ...]
"""Ids with their probabilities, the most probable first."""


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities of the clean token at the masks of the network input."""

    positions: tuple[int, ...]
    """The n predicted masks: all masks or, for autoregressive methods, the first one."""
    denoiser: Tensor
    """(n, V)"""
    anchor: Tensor | None
    """(n, V); None if there is no anchor network."""

    def best_anchors(self) -> dict[int, int]:
        """The anchor network's top prediction at each position."""
        return {} if self.anchor is None else _argmax_by_position(self.positions, self.anchor)


def predict(lm: LanguageModel, frame: Frame, row: int) -> Predictions:
    """The predictions at the masks of a row from the frame's network input: one call of each network."""
    z, rows, positions = _network_input(lm, frame.read[row])
    alpha = _conditioning_alpha(frame, row)
    return Predictions(positions, lm.log_probs(z, alpha)[0, rows].float().cpu(), _anchor_log_probs(lm, z, alpha, rows))


def anchors_of(lm: LanguageModel, frame: Frame, row: int) -> dict[int, int]:
    """The anchor network's top prediction at each mask, without a denoiser call; empty without an anchor network."""
    z, rows, positions = _network_input(lm, frame.read[row])
    anchor = _anchor_log_probs(lm, z, _conditioning_alpha(frame, row), rows)
    return {} if anchor is None else _argmax_by_position(positions, anchor)


def top_guesses(log_probs: Tensor) -> list[Guesses]:
    """The most probable tokens of each row of (n, V), with probabilities rounded to three digits."""
    best = log_probs.float().exp().topk(min(NUM_GUESSES, log_probs.shape[-1]), dim=-1)
    return [
        tuple((index, float(f"{probability:.3g}")) for index, probability in zip(ids, probabilities, strict=True))
        for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def guesses(log_probs: Tensor | None, positions: tuple[int, ...], wanted: Iterable[int]) -> dict[int, Guesses]:
    """The most probable tokens at the wanted positions that are among the predicted ones."""
    if log_probs is None:
        return {}
    row_of = {position: row for row, position in enumerate(positions)}
    found = [position for position in wanted if position in row_of]
    return dict(zip(found, top_guesses(log_probs[[row_of[position] for position in found]]), strict=True))


def _network_input(lm: LanguageModel, z: Tensor) -> tuple[Tensor, list[int], tuple[int, ...]]:
    """The network input (1, l), the output rows to read, and the positions in z that these rows predict.

    An autoregressive output row predicts the next position.
    """
    masks = (z == lm.mask_id).nonzero().flatten().tolist()
    if masks and lm.method.causal:
        return z[None, : masks[0]], [masks[0] - 1], (masks[0],)
    return z[None], masks, tuple(masks)


def _conditioning_alpha(frame: Frame, row: int) -> float | None:
    return None if frame.alpha is None else float(frame.alpha[row])


def _anchor_log_probs(lm: LanguageModel, z: Tensor, alpha: float | None, rows: list[int]) -> Tensor | None:
    try:
        return lm.anchor_logits(z, alpha)[0, rows].float().log_softmax(-1).cpu()
    except UserError:  # the method has no anchor network
        return None


def _argmax_by_position(positions: tuple[int, ...], log_probs: Tensor) -> dict[int, int]:
    return dict(zip(positions, log_probs.argmax(-1).tolist(), strict=True))
