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
from adlm.sampling.frame import Denoiser, Frame, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import draw_tokens
from adlm.sampling.steps import Steps


def confident_remasking(chance: Tensor, drawn: Tensor, ceiling: Tensor) -> Tensor:
    """sigma (B, L) = sigma_max * softmax over the drawn visible tokens of minus the chance each had; 0 elsewhere.

    A row that shows no drawn token has nothing to mask.
    """
    weights = torch.where(drawn, -chance.double(), -torch.inf).softmax(dim=-1)
    return torch.where(drawn, weights, 0.0) * ceiling.to(weights)


def sample_remdm_conf(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """A Frame for every step in which something changes. Masked tokens are revealed as in ancestral sampling.

    Which tokens are masked, and how likely each was, is the host's to know: it waits once a step, for the new chances.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    (num_rows, _), device, end = canvas.shape, canvas.device, len(steps.reveal)
    open_ = (canvas == mask_id).cpu()
    masked, chance = open_, (~open_).float()
    ceilings = remasking_ceiling(steps.alpha_s, steps.alpha_t)
    for step in range(end + 1):
        if step < end:
            points = draws.at_places(open_)
            reveals = masked & (points < steps.reveal[step])
            remasks = points < confident_remasking(chance, open_ & ~masked, ceilings[step])
        else:
            reveals, remasks = masked, torch.zeros_like(masked)
        if not (reveals | remasks).any():
            continue
        t, alpha = (each[step].expand(num_rows) for each in (steps.reached, steps.told))
        revealed, remasked = reveals.to(device), remasks.to(device)
        ids, chance = frame.ids.masked_fill(remasked, mask_id), chance.masked_fill(remasks, 0.0)
        places = reveals.flatten().nonzero()[:, 0].to(device)
        if len(places):
            log_beliefs = denoiser(frame.ids, alpha, pad).log_beliefs(places)
            numbers = draws.at_tokens(reveals).to(device)
            drawn = draw_tokens(log_beliefs, frame.ids, places, numbers, sampling, pad)
            if step == end and sampling.final == "argmax":
                drawn = drawn.but_likeliest(torch.ones_like(places, dtype=torch.bool), log_beliefs)
            ids.view(-1).index_copy_(0, places, drawn.tokens)
            chance[reveals] = drawn.chance.cpu()
        masked = masked ^ reveals ^ remasks
        frame = Frame(ids, t, revealed, remasked, chance.to(device), frame.ids, alpha)
        yield frame
