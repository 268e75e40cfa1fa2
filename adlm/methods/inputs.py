"""What every method is given: ids, canvas and padding, checked in the user's words. Knows no mathematics.

Shapes: B sequences, L tokens. `pad` is True at padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Vocabulary
from adlm.errors import UserError


def vocabulary_of(config: Config) -> Vocabulary:
    if config.vocabulary is None:
        raise UserError(
            "vocabulary is not settled yet: take it from a tokenizer (adlm.tokens), "
            "or give vocabulary.size and vocabulary.mask_id"
        )
    return config.vocabulary


def check_clean(x: Tensor, vocabulary: Vocabulary) -> None:
    """Clean ids are ids, and none of them is the mask."""
    _check_ids(x, vocabulary, "text")
    masks = int((x == vocabulary.mask_id).sum())
    if masks:
        raise UserError(
            f"the text holds the mask id {vocabulary.mask_id} at {masks} of {x.numel()} positions; "
            "clean text never does: masks are laid by the method"
        )


def check_canvas(config: Config, canvas: Tensor) -> None:
    """A canvas fits the model and has something to fill in."""
    vocabulary = vocabulary_of(config)
    _check_ids(canvas, vocabulary, "canvas")
    if canvas.shape[1] > config.length:
        raise UserError(
            f"the canvas is {canvas.shape[1]} tokens long and the model was made for length {config.length}; "
            "shorten the canvas"
        )
    complete = (canvas != vocabulary.mask_id).all(dim=1)
    if complete.any():
        raise UserError(
            f"row {int(complete.nonzero()[0])} of the canvas has no mask id {vocabulary.mask_id}: there is nothing to "
            "fill in; put the mask where text is wanted"
        )


def _check_ids(ids: Tensor, vocabulary: Vocabulary, what: str) -> None:
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise UserError(
            f"the {what} must be int64 ids of shape (sequences, length), not {str(ids.dtype).removeprefix('torch.')} "
            f"of shape {tuple(ids.shape)}"
        )
    outside = (ids < 0) | (ids >= vocabulary.size)
    if outside.any():
        raise UserError(
            f"the {what} holds id {int(ids[outside][0])}, outside the vocabulary of {vocabulary.size} symbols; "
            "was it made with another tokenizer?"
        )


def seen_pad(config: Config, pad: Tensor | None) -> Tensor | None:
    """The padding the network must not attend to."""
    return pad if config.data.pad == "masked" else None


def not_pad(x: Tensor, pad: Tensor | None) -> Tensor:
    """(B, L), True at text."""
    return torch.ones_like(x, dtype=torch.bool) if pad is None else ~pad


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Dropout off inside, as it was before outside."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
