"""The forward process q(z_t | x) and its exact reversals. No networks, no time grids.

Shapes: B sequences, L tokens each, V symbols (the mask is one of them). alpha and sigma broadcast over (B, L).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.times import BatchRng


def mask_tokens(x: Tensor, mask_chance: Tensor, mask_id: int, rng: BatchRng) -> Tensor:
    """z_t ~ q(z_t | x): each token is masked independently with probability 1 - alpha_t, else kept.  [ADLM Eq. 1]"""
    return torch.where(rng.uniform(tuple(x.shape), x.device) < mask_chance, mask_id, x)


def mask_counted(x: Tensor, text: Tensor, share: Tensor, mask_id: int, rng: BatchRng) -> tuple[Tensor, Tensor]:
    """ids with exactly ceil(share n) of the n tokens where `text` (B, L) is True masked, and that number over n (B,).

    For a share (B,) uniform in (0, 1] the number is uniform in 1, ..., n and all sets of that size are equally likely,
    as under `mask_tokens` given the number of masks.
    """
    length = text.sum(dim=1)
    num_masks = torch.ceil(share.to(x.device) * length).long().clamp(min=1)
    order = rng.uniform(tuple(x.shape), x.device).masked_fill(~text, 2.0)
    masked = order.argsort(dim=1).argsort(dim=1) < num_masks[:, None]
    return x.masked_fill(masked, mask_id), num_masks / length.double()


def reveal_chance(alpha_s: Tensor, alpha_t: Tensor, sigma: Tensor | float = 0.0) -> Tensor:
    """P(a masked token is revealed between t and s) = (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t).  [ADLM Eq. 6]

    sigma = 0 is ancestral sampling [ADLM Eq. 3]; any sigma up to `remasking_ceiling` leaves q(z_s | x) unchanged.
    At alpha_t = 1 nothing is masked and the probability is undefined.
    """
    return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)


def remasking_ceiling(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """sigma_max = min(1, (1 - alpha_s) / alpha_t): above it the reveal probability would exceed 1.  [ReMDM]

    At alpha_t = 0 nothing is visible, and any sigma up to 1 is allowed.
    """
    return torch.where(alpha_t > 0, (1 - alpha_s) / alpha_t, 1.0).clamp(max=1)


def posterior(
    z: Tensor, beliefs: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int, sigma: Tensor | float = 0.0
) -> Tensor:
    """p(z_s | z_t) at every position, (B, L, V): what one reverse step draws from.  [ADLM Eq. 6, Eq. 3 at sigma = 0]

    A visible token is remasked with probability sigma, else it stays; a masked one is revealed with probability
    `reveal_chance`, its identity drawn from the beliefs (B, L, V). With the true x for beliefs, a one-hot, this is
    q(z_s | z_t, x). The anchor transition is the same step with the anchor network's prediction.  [ADLM Eq. 5]
    """
    return transition(z, beliefs, reveal_chance(alpha_s, alpha_t, sigma), torch.as_tensor(sigma), mask_id)


def transition(z: Tensor, beliefs: Tensor, reveal: Tensor, remask: Tensor, mask_id: int) -> Tensor:
    """One step's categorical distributions (B, L, V) from its two probabilities, which broadcast over (B, L).

    A masked token is revealed with probability `reveal`, its identity drawn from the beliefs; a visible one is remasked
    with probability `remask`.
    """
    symbols = beliefs.shape[-1]
    reveal, remask = reveal.to(beliefs)[..., None], remask.to(beliefs)[..., None]
    to_mask = F.one_hot(torch.full_like(z, mask_id), symbols).to(beliefs.dtype)
    to_itself = F.one_hot(z, symbols).to(beliefs.dtype)
    if_masked = reveal * beliefs + (1 - reveal) * to_mask
    if_visible = (1 - remask) * to_itself + remask * to_mask
    return torch.where((z == mask_id)[..., None], if_masked, if_visible)
