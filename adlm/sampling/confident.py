"""remdm-conf: what is masked again depends on how sure the network was when it revealed it. Knows no schedule.

The places of a step are known only after the step before it, but still before its own beliefs: they are drawn first,
the head runs at what is revealed, and a step that reveals nothing needs no network.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.diffusion.masking import remasking_ceiling
from adlm.sampling.denoiser import Denoiser
from adlm.sampling.draws import RowDraws
from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.shaping import draw_tokens
from adlm.sampling.steps import Steps


def confident_remasking(chance: Tensor, drawn: Tensor, ceiling: Tensor) -> Tensor:
    """sigma (B, L) = sigma_max * softmax over the drawn visible tokens of minus the chance each had; 0 elsewhere.

    A row that shows no drawn token has nothing to mask.
    """
    weights = torch.where(drawn, -chance.double(), -torch.inf).softmax(dim=-1)
    return torch.where(drawn, weights, 0.0) * ceiling.to(weights)


def confident_walk(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowDraws,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """A Frame for every step in which something changes. Masked tokens are revealed as in ancestral sampling."""
    frame = first_frame(canvas, mask_id)
    yield frame
    open_ = canvas == mask_id
    ceilings = remasking_ceiling(steps.alpha_s, steps.alpha_t)
    for step, t in enumerate(steps.t[1:]):
        z, points = frame.ids, draws.at_places(open_)
        masked = z == mask_id
        reveals = masked & (points < steps.reveal[step])
        remasks = points < confident_remasking(frame.chance, open_ & ~masked, ceilings[step])
        if not (reveals | remasks).any():
            continue
        frame = _changed(frame, reveals, remasks, t, denoiser, steps.alpha_t[step], mask_id, sampling, draws, pad)
        yield frame
    if (frame.ids == mask_id).any():
        last = frame.ids == mask_id
        nothing = torch.zeros_like(last)
        alpha = steps.alpha_s[-1]
        yield _changed(frame, last, nothing, steps.t[-1], denoiser, alpha, mask_id, sampling, draws, pad, last=True)


def _changed(
    frame: Frame,
    reveals: Tensor,
    remasks: Tensor,
    t: Tensor,
    denoiser: Denoiser,
    alpha: Tensor,
    mask_id: int,
    sampling: Sampling,
    draws: RowDraws,
    pad: Tensor | None,
    last: bool = False,
) -> Frame:
    ids, chance = frame.ids.masked_fill(remasks, mask_id), frame.chance.masked_fill(remasks, 0.0)
    places, told = reveals.flatten().nonzero()[:, 0], alpha.expand(len(ids))
    if len(places):
        log_beliefs = denoiser(frame.ids, told, pad).log_beliefs(places)
        drawn = draw_tokens(log_beliefs, frame.ids, places, draws.at_tokens(reveals), sampling, pad)
        if last and sampling.final == "argmax":
            drawn = drawn.but_likeliest(torch.ones_like(places, dtype=torch.bool), log_beliefs)
        ids.view(-1)[places], chance.view(-1)[places] = drawn.tokens, drawn.chance
    return Frame(ids, t.expand(len(ids)), reveals, remasks, chance, frame.ids, told)
