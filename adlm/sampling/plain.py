"""The reverse walk, one full posterior a step: slow and obviously right, the oracle of every faster sampler.

Knows a denoiser only as `beliefs(z, t)`: noisy ids (B, L) and a time -> probabilities of clean tokens (B, L, V).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.diffusion.masking import posterior, remasking_ceiling
from adlm.sampling.draws import draw
from adlm.sampling.frame import Frame

Beliefs = Callable[[Tensor, Tensor], Tensor]


# How likely a visible token is masked again, from eta and the ceiling that keeps the marginal q(z_s | x).
REMASKING: dict[str, Callable[[float, Tensor], Tensor]] = {
    "ancestral": lambda eta, ceiling: torch.zeros_like(ceiling),
    "remdm-cap": lambda eta, ceiling: torch.clamp(ceiling, max=eta),
    "remdm-rescale": lambda eta, ceiling: eta * ceiling,
}


def walk(
    beliefs: Beliefs,
    canvas: Tensor,
    mask_id: int,
    times: Tensor,
    alphas: Tensor,
    sigma: Callable[[Tensor], Tensor],
    final: str,
    generator: torch.Generator,
) -> Iterator[Frame]:
    """From the canvas at times[0] to times[-1], then `final` for what is still masked; the first Frame is the canvas.

    `alphas` are the schedule's at `times`; `sigma` maps a step's remasking ceiling to the remasking it does. Tokens
    given on the canvas stay: they are neither drawn nor remasked.
    """
    open_ = canvas == mask_id
    z = canvas
    nothing = torch.zeros_like(open_)
    yield Frame(z, float(times[0]), nothing, nothing)
    for t, s, alpha_t, alpha_s in zip(times[:-1], times[1:], alphas[:-1], alphas[1:], strict=True):
        remasking = sigma(remasking_ceiling(alpha_s, alpha_t))
        step = posterior(z, beliefs(z, t).double(), alpha_s, alpha_t, mask_id, remasking)
        frame = _moved(z, torch.where(open_, draw(step, generator), canvas), float(s), mask_id)
        z = frame.ids
        yield frame
    if (z == mask_id).any():
        last = beliefs(z, times[-1])
        guess = last.argmax(dim=-1) if final == "argmax" else draw(last, generator)
        yield _moved(z, torch.where(z == mask_id, guess, z), float(times[-1]), mask_id)


def _moved(before: Tensor, after: Tensor, t: float, mask_id: int) -> Frame:
    was, now = before == mask_id, after == mask_id
    return Frame(after, t, was & ~now, ~was & now)
