"""What AR and A2R share: which tokens are predicted, and the plain walk. Knows the networks as functions to logits.

Shapes: B sequences, L tokens, V symbols.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import subs
from adlm.errors import UserError
from adlm.methods.inputs import check_canvas, evaluating, not_pad, vocabulary_of
from adlm.sampling.frame import Frame
from adlm.sampling.left_to_right import plain_left_to_right


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
    config: Config, network: nn.Module, canvas: Tensor, sampling: Sampling, generator: torch.Generator
) -> Iterator[Frame]:
    """The plain walk. The canvas is a prompt and then masks; a masked first token becomes bos."""
    vocabulary = vocabulary_of(config)
    check_canvas(config, canvas, sampling)
    if sampling.sampler != "ancestral":
        raise UserError(
            f"sampling.sampler {sampling.sampler} masks tokens again, and {config.method} has no masks; use ancestral"
        )
    masked = canvas == vocabulary.mask_id
    if (masked[:, :-1] & ~masked[:, 1:]).any():
        raise UserError(
            f"the canvas gives a token after a mask, and {config.method} writes from left to right without looking "
            "ahead; give the prompt first, or use a diffusion model"
        )
    if masked[:, 0].any():
        if vocabulary.bos_id is None:
            raise UserError(
                f"the canvas begins with a mask, and {config.method} needs a first token: vocabulary.bos_id is empty, "
                "so give one"
            )
        canvas = torch.where(
            masked & (torch.arange(canvas.shape[1], device=canvas.device) == 0), vocabulary.bos_id, canvas
        )

    return plain_left_to_right(
        lambda x: log_beliefs(config, network, x)[:, -1].exp(), canvas, vocabulary.mask_id, generator
    )


@torch.no_grad()
def log_beliefs(config: Config, network: nn.Module, x: Tensor) -> Tensor:
    """(B, L, V), of the token after each place; the mask is no token."""
    mask_id = vocabulary_of(config).mask_id
    with evaluating(network):
        return subs(network(x), torch.full_like(x, mask_id), mask_id)
