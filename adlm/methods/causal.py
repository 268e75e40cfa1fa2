"""What AR and A2R share: which tokens are predicted, and how they are drawn. Knows the networks as functions to logits.

Shapes: B sequences, L tokens, V symbols.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates
from adlm.methods.inputs import check_canvas, eval_mode, not_pad, vocabulary_of
from adlm.sampling.frame import Frame
from adlm.sampling.left_to_right import (
    NextTokenSampler,
    draw_next,
    needs_history,
    sample_left_to_right,
    sampler_from_model,
)
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens


def predicted(x: Tensor, pad: Tensor | None) -> Tensor:
    """(B, L), True at every token of the text but the first; padding comes after the text."""
    if pad is not None and (pad[:, :-1] & ~pad[:, 1:]).any():
        raise UserError(
            "pad stands before text, and from left to right the text would be read from it; pad on the right"
        )
    counted = not_pad(x, pad).clone()
    counted[:, 0] = False
    return counted


def generate(
    config: Config,
    network: nn.Module | FrozenNetwork,
    canvas: Tensor,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """One token after the other. The canvas is a prompt and then masks; a masked first token becomes bos."""
    vocabulary = vocabulary_of(config)
    check_canvas(config, canvas, sampling, pad)
    if sampling.sampler not in ("ancestral", "left-to-right"):
        raise UserError(
            f"sampling.sampler {sampling.sampler} fills masks anywhere, and {config.method} writes from left to right; "
            "use left-to-right"
        )
    masked = canvas == vocabulary.mask_id
    ahead = (masked[:, :-1] & ~masked[:, 1:] & not_pad(canvas, pad)[:, 1:]).any(dim=1)
    if ahead.any():
        raise UserError(
            f"row {draws.rows[int(ahead.nonzero()[0])]} of the canvas gives a token after a mask, and {config.method} "
            "writes from left to right without looking ahead; give the prompt first, or use a diffusion model"
        )
    if masked[:, 0].any():
        if vocabulary.bos_id is None:
            raise UserError(
                f"the canvas begins with a mask, and {config.method} needs a first token: vocabulary.bos_id is empty, "
                "so give one"
            )
        first = torch.where(masked[:, :1], vocabulary.bos_id, canvas[:, :1])
        canvas = torch.cat([first, canvas[:, 1:]], dim=1)
    writer = next_token_sampler(config, network, sampling, *canvas.shape)
    return sample_left_to_right(writer, canvas, vocabulary.mask_id, draws, pad)


def next_token_sampler(
    config: Config, network: nn.Module | FrozenNetwork, sampling: Sampling, rows: int, length: int
) -> NextTokenSampler:
    """A network that rests keeps the keys and values of what it has read; one in training reads it all anew."""
    if isinstance(network, FrozenNetwork):
        return _with_cache(network, vocabulary_of(config).mask_id, rows, length, sampling)
    read: list[Tensor] = []

    def anew(ids: Tensor) -> Tensor:
        read.append(ids)
        return log_beliefs(config, network, torch.cat(read, dim=1))[:, -1]

    return sampler_from_model(anew, sampling)


def _with_cache(network: FrozenNetwork, mask_id: int, rows: int, length: int, sampling: Sampling) -> NextTokenSampler:
    """Reading and drawing are one call of the network, so that a device is given a whole token at once.

    Room for what is read is taken with the first word: a walk that is only checked needs none.
    """
    room, hand_over = functools.cache(lambda: network.cache(rows, length)), needs_history(sampling)

    def draw_after(hidden: HiddenStates, points: Tensor, z: Tensor | None) -> DrawnTokens:
        beliefs = clean_log_beliefs(network.logits(hidden.last[:, -1]), mask_id)
        return draw_next(beliefs, z, points, sampling)

    return lambda ids, z, points: network.read_and(draw_after, ids, room(), points, z if hand_over else None)


@torch.no_grad()
def log_beliefs(config: Config, network: nn.Module, x: Tensor) -> Tensor:
    """(B, L, V), of the token after each place; the mask is no token."""
    mask_id = vocabulary_of(config).mask_id
    with eval_mode(network):
        return clean_log_beliefs(network(x), mask_id)
