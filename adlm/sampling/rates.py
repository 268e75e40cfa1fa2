"""Sampling in the order of a network that predicts it: the next token is drawn in proportion to the masks' rates.

Shapes: B sequences, L tokens, N positions. Positions are flat: row * L + position.
"""

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor

from adlm.sampling.frame import DenoiserOutput, Frame, SamplingRun, first_frame
from adlm.sampling.shaping import draw_tokens


class RatedOutput(DenoiserOutput, Protocol):
    """The output of a network that predicts rates."""

    def log_rates(self, positions: Tensor) -> Tensor:
        """(N,), at masked positions (N,)."""
        ...


def sample_by_rates(run: SamplingRun) -> Iterator[Frame]:
    """One Frame per step. A row's masks are spread evenly over the steps, one a step if there are fewer.

    The positions of a step are drawn one after the other without replacement, by the rates before the step, and their
    tokens independently. So with one token a step this draws from the model's distribution.
    """
    mask_id = run.mask_id
    frame = first_frame(run.canvas, mask_id)
    yield frame
    num_masks = (run.canvas == mask_id).sum(dim=1)
    num_steps = num_masks.clamp(max=run.sampling.steps)
    for step in range(int(num_steps.max())):
        masked = frame.ids == mask_id
        output = cast(RatedOutput, run.denoiser(frame.ids, None, run.pad))
        uniforms = run.rng.at_positions(masked)
        log_rates = torch.full(masked.shape, -torch.inf, dtype=torch.float64, device=masked.device)
        log_rates[masked] = output.log_rates(masked.flatten().nonzero()[:, 0]).double()
        order = log_rates - torch.log(-torch.log1p(-uniforms))  # the first clocks that ring, see `mask_counted`
        rank = order.masked_fill(~masked, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        num_revealed = num_masks * (step + 1) // num_steps.clamp(min=1)  # in all, after this step
        chosen = masked & (rank < (num_revealed - (num_masks - masked.sum(dim=1)))[:, None])
        positions = chosen.flatten().nonzero()[:, 0]
        tokens = run.rng.at_tokens(chosen)
        drawn = draw_tokens(output.log_beliefs(positions), frame.ids, positions, tokens, run.sampling, run.pad)
        ids, chance = frame.ids.clone(), frame.chance.clone()
        ids.view(-1)[positions], chance.view(-1)[positions] = drawn.tokens, drawn.chance
        t = (ids == mask_id).sum(dim=1).double() / num_masks.clamp(min=1)
        frame = Frame(ids, t.cpu(), chosen, torch.zeros_like(chosen), chance, frame.ids, None)
        yield frame
