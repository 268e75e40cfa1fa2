"""The forward process q(z_t | x) and its exact reversals. No networks, no time grids.

Shapes: B sequences, L tokens each, V symbols (the mask is one of them). alpha and the chance
`remask` that a visible token is remasked (sigma_t in the paper) broadcast over (B, L).
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
    order = rng.uniform(tuple(x.shape), x.device)
    return mask_first(x, text, share, order, mask_id)


def draw_order(log_rates: Tensor, rng: BatchRng) -> Tensor:
    """(B, L), a random order of the tokens: see `order_by_clocks`."""
    uniforms = rng.uniform(tuple(log_rates.shape), log_rates.device).double().clamp(min=2.0**-26)
    return order_by_clocks(log_rates.double(), uniforms)


def order_by_clocks(log_rates: Tensor, uniforms: Tensor) -> Tensor:
    """(B, L): tokens are revealed in order of falling numbers, from uniform numbers (B, L) in [0, 1).

    Each time one of those left is revealed, with a probability in proportion to its rate: the one whose clock rings
    first, after a time of exponential distribution with that rate. The numbers are minus the logarithms of the times.
    """
    return log_rates - torch.log(-torch.log1p(-uniforms))


def mask_first(x: Tensor, text: Tensor, share: Tensor, order: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """`mask_counted` of those tokens where the numbers `order` (B, L) are lowest."""
    length = text.sum(dim=1)
    num_masks = torch.ceil(share.to(x.device) * length).long().clamp(min=1)
    order = order.masked_fill(~text, torch.inf)
    masked = text & (order.argsort(dim=1).argsort(dim=1) < num_masks[:, None])  # rows without text have no masks
    return x.masked_fill(masked, mask_id), num_masks / length.double()


def last_revealed(revealed: Tensor, alpha: Tensor, alphas: Tensor, rng: BatchRng) -> Tensor:
    """(B, L), True at the tokens that were revealed in the last step of a sampler, among those `revealed` until t.

    A token visible at t was masked at the earlier time r with probability 1 - alpha_r / alpha_t. So at its reveal alpha
    was uniform between 0 and alpha_t, here `alpha` (B,). `alphas` (T + 1,) rise: they are those of the sampler's times.
    """
    at_reveal = rng.uniform(tuple(revealed.shape), revealed.device).double() * alpha[:, None]
    step = torch.searchsorted(alphas, at_reveal, right=True).clamp(min=1).masked_fill(~revealed, 0)
    return revealed & (step == step.amax(dim=1, keepdim=True))


def reveal_chance(alpha_s: Tensor, alpha_t: Tensor, remask: Tensor | float = 0.0) -> Tensor:
    """P(a masked token is revealed between t and s) = (alpha_s - (1 - remask) alpha_t) / (1 - alpha_t).  [ADLM Eq. 6]

    remask = 0 is ancestral sampling [ADLM Eq. 3]; any remask up to `remasking_ceiling` leaves q(z_s | x) unchanged.
    At alpha_t = 1 nothing is masked and the probability is undefined.
    """
    return (alpha_s - (1 - remask) * alpha_t) / (1 - alpha_t)


def remasking_ceiling(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """The largest remask, min(1, (1 - alpha_s) / alpha_t): above it the reveal probability would exceed 1.  [ReMDM]

    At alpha_t = 0 nothing is visible, and any remask up to 1 is allowed.
    """
    return torch.where(alpha_t > 0, (1 - alpha_s) / alpha_t, 1.0).clamp(max=1)


def posterior(
    z: Tensor, beliefs: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int, remask: Tensor | float = 0.0
) -> Tensor:
    """p(z_s | z_t) at every position, (B, L, V): what one reverse step draws from.  [ADLM Eq. 6, Eq. 3 at remask = 0]

    A visible token is remasked with probability `remask`, else it stays; a masked one is revealed with probability
    `reveal_chance`, its identity drawn from the beliefs (B, L, V). With the true x for beliefs, a one-hot, this is
    q(z_s | z_t, x). The anchor transition is the same step with the anchor network's prediction.  [ADLM Eq. 5]
    """
    return transition(z, beliefs, reveal_chance(alpha_s, alpha_t, remask), torch.as_tensor(remask), mask_id)


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


def absorbing_posterior(z: Tensor, beliefs: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int) -> Tensor:
    """p(z_s | z_t) (B, L, V), proportional to q(z_t | z_s) q(z_s | x_theta); a visible token stays.  [D3PM]

    `posterior` is the step for SUBS beliefs, which put no mass on the mask. Here x_theta is a distribution over all V
    symbols, and the step is Bayes' rule with x_theta in place of the clean token.
    """
    mask_mass = beliefs[..., mask_id, None]
    alpha_s, alpha_t = (alpha.to(beliefs.device)[..., None] for alpha in (alpha_s, alpha_t))
    norm = 1 - alpha_t + alpha_t * mask_mass
    revealed = (alpha_s - alpha_t) * beliefs / norm
    masked = (1 - alpha_s + alpha_s * mask_mass) / norm
    to_mask = F.one_hot(torch.full_like(z, mask_id), beliefs.shape[-1]).to(beliefs.dtype)
    if_masked = torch.where(to_mask > 0, masked, revealed)
    stays = F.one_hot(z, beliefs.shape[-1]).to(beliefs.dtype)
    return torch.where((z == mask_id)[..., None], if_masked, stays)


def absorbing_divergence(log_right: Tensor, log_mask: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """KL(q(z_s | z_t, x) || `absorbing_posterior`) at a masked token, from log x_theta of the right token and the mask.

    With no mass on the mask it is reveal_chance * -log x_theta. At alpha_s = 1 a masked z_s has probability 0, and its
    term, of the form 0 log 0, is 0.
    """
    reveal, mask_mass = (alpha_s - alpha_t) / (1 - alpha_t), log_mask.exp()
    gain_t = torch.log1p(alpha_t * mask_mass / (1 - alpha_t))
    is_clean = alpha_s >= 1
    gain_s = torch.log1p(alpha_s * mask_mass / torch.where(is_clean, 1.0, 1 - alpha_s))
    return reveal * (gain_t - log_right) + torch.where(is_clean, 0.0, (1 - reveal) * (gain_t - gain_s))
