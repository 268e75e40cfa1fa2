"""D3PM's reverse step for beliefs that may put mass on the mask. Does not depend on networks.

`masking.posterior` is the step for SUBS beliefs, which put none there. Here x_theta is a distribution over all V
symbols, and the step is Bayes' rule with x_theta in place of the clean token.

Shapes: B sequences, L tokens, V symbols (the mask is one of them); alphas broadcast over (B, L).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def absorbing_posterior(z: Tensor, beliefs: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int) -> Tensor:
    """p(z_s | z_t) (B, L, V), proportional to q(z_t | z_s) q(z_s | x_theta); a visible token stays."""
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
