"""The reverse walk, one full posterior a step: slow and obviously right, the oracle of every faster sampler.

Knows a denoiser only as `beliefs(z, t)`: noisy ids (B, L) and a time -> probabilities of clean tokens (B, L, V).
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.diffusion.masking import posterior, remasking_ceiling
from adlm.sampling.draws import draw
from adlm.sampling.frame import Frame, changed, start

Beliefs = Callable[[Tensor, Tensor], Tensor]
Transition = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(z, t, alpha_s, alpha_t) -> p(z_s | z_t), (B, L, V)."""


# How likely a visible token is masked again, from eta and the ceiling that keeps the marginal q(z_s | x).
REMASKING: dict[str, Callable[[float, Tensor], Tensor]] = {
    "ancestral": lambda eta, ceiling: torch.zeros_like(ceiling),
    "remdm-cap": lambda eta, ceiling: torch.clamp(ceiling, max=eta),
    "remdm-rescale": lambda eta, ceiling: eta * ceiling,
}


def subs_transition(beliefs: Beliefs, mask_id: int, sigma: Callable[[Tensor], Tensor]) -> Transition:
    """One reverse step with SUBS beliefs; `sigma` maps the step's remasking ceiling to the remasking it does."""

    def transition(z: Tensor, t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        remasking = sigma(remasking_ceiling(alpha_s, alpha_t))
        return posterior(z, beliefs(z, t).double(), alpha_s, alpha_t, mask_id, remasking)

    return transition


def walk(
    transition: Transition,
    beliefs: Beliefs,
    canvas: Tensor,
    mask_id: int,
    times: Tensor,
    alphas: Tensor,
    final: str,
    generator: torch.Generator,
) -> Iterator[Frame]:
    """From the canvas at times[0] to times[-1], then `final` for what is still masked; the first Frame is the canvas.

    `alphas` are the schedule's at `times`. Tokens given on the canvas stay: they are neither drawn nor remasked.
    """
    open_ = canvas == mask_id
    z = canvas
    yield start(z, float(times[0]), mask_id)
    for (t, alpha_t), (s, alpha_s) in itertools.pairwise(zip(times, alphas, strict=True)):
        drawn = draw(transition(z, t, alpha_s, alpha_t), generator)
        frame = changed(z, torch.where(open_, drawn, canvas), float(s), mask_id)
        z = frame.ids
        yield frame
    if (z == mask_id).any():
        last = beliefs(z, times[-1])
        guess = last.argmax(dim=-1) if final == "argmax" else draw(last, generator)
        yield changed(z, torch.where(z == mask_id, guess, z), float(times[-1]), mask_id)
