"""Logits -> SUBS beliefs, distributions over clean tokens; and the scores of SEDD. Does not depend on networks.

A score is the ratio q(z with another token at a position) / q(z), learnt at masked positions. For the true beliefs p it
is p / expm1(sigma_t), where expm1(sigma_t) = (1 - alpha_t) / alpha_t, so scores and beliefs determine each other.

Shapes: B sequences, L tokens each, V symbols (the mask is one of them); sigma broadcasts over (B, L).
"""

import math

import torch
from torch import Tensor


def clean_log_beliefs(logits: Tensor, mask_id: int) -> Tensor:
    """Log softmax (..., V) over all symbols except the mask, in float32 or float64.

    The mask is at -inf, not at a large negative number: its probability is zero.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    without_mask = logits.to(dtype, copy=True)
    without_mask[..., mask_id].fill_(
        -torch.inf
    )  # assigning a Python number by index would make the host wait for a GPU
    return log_softmax(without_mask)


def log_softmax(logits: Tensor) -> Tensor:
    """torch.log_softmax over the last dimension, with the sum in float64.

    A row's result should then not depend on its index. In float32 its last bit can on CUDA, where the order in which
    PyTorch adds depends on the alignment of the row in memory, and so on its index if V is not a multiple of 4.
    """
    shifted = logits - logits.detach().amax(dim=-1, keepdim=True)
    return shifted - shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log().to(logits.dtype)


def subs(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """log beliefs (B, L, V): no mass on the mask, and a visible token is copied (SUBS)."""
    guessed = clean_log_beliefs(logits, mask_id)
    copied = torch.full_like(guessed, -torch.inf).scatter(-1, z[..., None], 0.0)
    return torch.where((z == mask_id)[..., None], guessed, copied)


def log_ratio(sigma: Tensor) -> Tensor:
    """log r = -log expm1(sigma) = -sigma - log(1 - exp(-sigma)): finite even where expm1 overflows."""
    return -sigma - torch.log(-torch.expm1(-sigma))


def log_scores(logits: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
    """logits - log expm1(sigma) - log(V - 1), and 0 at z itself, (B, L, V): SEDD's parametrisation."""
    scale = log_ratio(sigma) - math.log(logits.shape[-1] - 1)
    return (logits + scale[..., None]).scatter(-1, z[..., None], 0.0)


def score_entropy(log_score_sum: Tensor, log_score_right: Tensor, sigma: Tensor) -> Tensor:
    """sum_v s_v - r log s_x + r (log r - 1), r = 1 / expm1(sigma): the loss of scores s at a masked token.  [SEDD]

    The sum runs over the clean tokens. The minimum, 0, is at s = r for the true token x and 0 elsewhere; for scores
    derived from beliefs p it is -r log p_x, so multiplied by sigma' it is the NELBO's weight times the cross-entropy.
    """
    log_r = log_ratio(sigma)
    return log_score_sum.exp() + log_r.exp() * (log_r - 1 - log_score_right)


def score_step(z: Tensor, log_score: Tensor, sigma_s: Tensor, sigma_t: Tensor, mask_id: int) -> Tensor:
    """p(z_s | z_t) of SEDD's analytic update, (B, L, V), from the log scores (B, L, V) of masked tokens.

    With d = sigma_t - sigma_s a masked token becomes v with probability (e^d - 1) s_v and stays masked with the rest,
    clipped at 0 (and all normalised) where the scores sum to too much. A visible token stays.
    """
    growth = torch.expm1(sigma_t - sigma_s)[..., None]
    mask = torch.tensor(mask_id, device=z.device)
    revealed = growth * log_score.exp().index_fill(-1, mask, 0.0)
    stays = (1 - revealed.sum(dim=-1, keepdim=True)).clamp(min=0)
    if_masked = torch.where(torch.arange(log_score.shape[-1], device=z.device) == mask_id, stays, revealed)
    copied = torch.zeros_like(if_masked).scatter(-1, z[..., None], 1.0)
    return torch.where((z == mask_id)[..., None], if_masked / if_masked.sum(dim=-1, keepdim=True), copied)
