"""ReMDM's confidence-based remasking: tokens drawn with a low probability are remasked more often.

Which positions change at a step depends on the step before, but not on the beliefs of the step itself. So they are
drawn first, the head runs only at the revealed positions, and a step that reveals nothing needs no network call.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from adlm.diffusion.masking import remasking_ceiling
from adlm.sampling.frame import Frame, SamplingRun, first_frame
from adlm.sampling.shaping import draw_tokens


def confident_remasking(chance: Tensor, drawn: Tensor, ceiling: Tensor) -> Tensor:
    """remask (B, L) = ceiling * softmax(-chance) over the positions with drawn tokens, 0 elsewhere.

    `chance` (B, L) is the probability each token was drawn with. A row without drawn tokens has remask 0.
    """
    weights = torch.where(drawn, -chance.double(), -torch.inf).softmax(dim=-1)
    return torch.where(drawn, weights, 0.0) * ceiling.to(weights)


def sample_remdm_conf(run: SamplingRun) -> Iterator[Frame]:
    """One Frame per step in which something changes. Masked tokens are revealed as in ancestral sampling.

    The masked positions and the probabilities live on the host, which waits for the device once a step.
    """
    canvas, mask_id, steps, rng = run.canvas, run.mask_id, run.steps, run.rng
    frame = first_frame(canvas, mask_id)
    yield frame
    (num_rows, _), device, end = canvas.shape, canvas.device, len(steps.reveal)
    to_fill = (canvas == mask_id).cpu()
    masked, chance = to_fill, (~to_fill).float()
    ceilings = remasking_ceiling(steps.alpha_s, steps.alpha_t)
    for step in range(end + 1):
        if step < end:
            uniforms = rng.at_positions(to_fill)
            reveals = masked & (uniforms < steps.reveal[step])
            remasks = uniforms < confident_remasking(chance, to_fill & ~masked, ceilings[step])
        else:
            reveals, remasks = masked, torch.zeros_like(masked)
        if not (reveals | remasks).any():
            continue
        t, alpha = (each[step].expand(num_rows) for each in (steps.end_time, steps.conditioning_alpha))
        revealed, remasked = reveals.to(device), remasks.to(device)
        ids, chance = frame.ids.masked_fill(remasked, mask_id), chance.masked_fill(remasks, 0.0)
        positions = reveals.flatten().nonzero()[:, 0].to(device)
        if len(positions):
            log_beliefs = run.denoiser(frame.ids, alpha, run.pad).log_beliefs(positions)
            token_uniforms = rng.at_tokens(reveals).to(device)
            drawn = draw_tokens(log_beliefs, frame.ids, positions, token_uniforms, run.sampling, run.pad)
            if step == end and run.sampling.final == "argmax":
                drawn = drawn.with_argmax(torch.ones_like(positions, dtype=torch.bool), log_beliefs)
            ids.view(-1).index_copy_(0, positions, drawn.tokens)
            chance[reveals] = drawn.chance.cpu()
        masked = masked ^ reveals ^ remasks
        frame = Frame(ids, t, revealed, remasked, chance.to(device), frame.ids, alpha)
        yield frame
