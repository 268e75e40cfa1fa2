"""The weights of the bounds, in nats per token, and which tokens are anchors. Does not depend on networks.

Shapes: B sequences, L tokens each, V symbols; weights broadcast over (B, L).

Every bound here is a sum over positions of weight * cross-entropy: this module gives the weights,
and `network.score` multiplies.
The mean is over all L tokens, masked or not.
"""

import math

import torch
from torch import Tensor

from adlm.diffusion.masking import remasking_ceiling, reveal_chance
from adlm.diffusion.schedules import NoiseSchedule


def continuous_weight(schedule: NoiseSchedule, t: Tensor) -> Tensor:
    """w(t) = -alpha'_t / (1 - alpha_t), 1/t for the log-linear schedule; for t > 0.  [ADLM Eq. 4]

    E over t uniform in (0, 1] of w(t) * (cross-entropy at masked positions) is the NELBO without the ends of the
    schedule: uniform beliefs over V clean tokens cost (alpha_0 - alpha_1) log V. The ends add `prior_nats` at t = 1 and
    the cross-entropy of what is still masked at t = 0.
    """
    return -schedule.alpha_prime(t) / schedule.mask_chance(t)


def discrete_weight(alpha_s: Tensor, alpha_t: Tensor, steps: int, remask: float = 0.0) -> Tensor:
    """T * (alpha_s - (1 - remask) alpha_t) / (1 - alpha_t): the weight of one step drawn from T steps.  [ADLM Eq. 7]

    The paper writes the negative of the fraction, lambda_t, before log p. remask is clipped at each step's
    `remasking_ceiling`. For remask = 0 the limit T -> infinity is `continuous_weight`.
    """
    return steps * reveal_chance(alpha_s, alpha_t, torch.clamp(remasking_ceiling(alpha_s, alpha_t), max=remask))


def prior_nats(schedule: NoiseSchedule, num_clean: int) -> float:
    """alpha_1 log V: the cost per token of t = 1, where sampling starts from masks but q leaves alpha_1 visible.

    KL(q(z_1 | x) || p(z_1)) for a p that reveals each token with probability alpha_1, uniform over V clean tokens.
    Needed for a valid bound unless the schedule ends fully masked, where it is 0.
    """
    return schedule.alpha(torch.ones((), dtype=torch.float64)).item() * math.log(num_clean)


def log_reveal_chances(log_rates: Tensor, masked: Tensor) -> Tensor:
    """(B, L), log P(a masked token is the next to be revealed): its rate's share of those of all masked ones.

    0 at tokens that are not masked.
    """
    log_chances = log_rates.masked_fill(~masked, -torch.inf).log_softmax(dim=1)
    return torch.where(masked, log_chances, 0.0)


def log_order_chance(log_rates: Tensor, order: Tensor, text: Tensor, masked: Tensor) -> Tensor:
    """(B,), log P(the tokens of a text that are not masked were revealed one after the other as they were).

    `order` (B, L) is that of `draw_order`. Of each step, it is the share of a rate in those of the tokens left.
    """
    by_order = order.masked_fill(~text, -torch.inf).argsort(dim=1)
    rates, counts = (each.gather(1, by_order) for each in (log_rates.masked_fill(~text, -1e30), text & ~masked))
    return torch.where(counts, rates - torch.logcumsumexp(rates, dim=1), 0.0).sum(dim=1)


def anchor_gamma(gamma: float, progress: float, warm_up: bool = True, until: float = 1.0) -> float | None:
    """The weight of the anchor term after a fraction `progress` of training; None where the loss has no such term."""
    if gamma == 0 or progress > until:
        return None
    return min(gamma, progress) if warm_up else gamma


def anchor_weight(weight: Tensor, anchors: Tensor, masked: Tensor, positions: str) -> Tensor:
    """The anchor term's weight before gamma: that of the bound, at anchors.  [ADLM Eq. 7]

    `positions` "masked" means masked anchors, as in Theorem 4.1; "all" includes visible ones, as in the released code.
    """
    return weight * {"all": anchors, "masked": anchors & masked}[positions]


def anchor_mask(x: Tensor, tau: int, num_symbols: int, pad: Tensor | None = None) -> Tensor:
    """True where a token's id occurs at most tau times in its own sequence, (B, L).

    Counted on the device in one pass, (B, V) integers. Padding (True in `pad`) is neither counted nor an anchor.
    """
    present = torch.ones_like(x) if pad is None else (~pad).to(x.dtype)
    counts = torch.zeros(x.shape[0], num_symbols, dtype=x.dtype, device=x.device).scatter_add(1, x, present)
    rare = counts.gather(1, x) <= tau
    return rare if pad is None else rare & ~pad
