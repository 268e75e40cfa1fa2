"""Hidden states -> nats at the positions that count, without ever holding all logits. Knows nothing of trunks.

Shapes: N selected tokens, d wide, V symbols; B sequences of L tokens before selection.

A head turns d numbers into V = 50,258. For a batch of 32 x 1024 tokens all logits are 6.6 GB in float32, and several
such tensors live at once in a plain backward pass. Here logits exist for a chunk of tokens at a time, and because the
weight of every token is known beforehand the gradients are formed in the same pass: three products in all, as in the
plain form, and nothing is computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**27  # 512 MB of float32, about 2,700 tokens with GPT-2's vocabulary


@dataclass(frozen=True)
class Scored:
    """What a head says of the right answers."""

    total: Tensor
    """Sum over tokens of weight * nats, a scalar: what is differentiated."""
    nats: Tensor
    """-log p of each token's right answer, 0 where its weight is 0; carries no gradient."""


def score_positions(hidden: Tensor, head: nn.Linear, x: Tensor, weight: Tensor, excluded: int | None = None) -> Scored:
    """`linear_cross_entropy` of a head over hidden (B, L, d) at the positions whose weight (B, L) is not 0."""
    selected = weight != 0
    scored = linear_cross_entropy(hidden[selected], head.weight, head.bias, x[selected], weight[selected], excluded)
    nats = torch.zeros(x.shape, dtype=scored.nats.dtype, device=x.device)
    nats[selected] = scored.nats
    return Scored(scored.total, nats)


def price_positions(
    hidden: Tensor, head: nn.Linear, where: Tensor, price: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`price(logits (n, V), index (n,))` of the positions `where` (B, L), put back in their places; 0 elsewhere.

    For objectives that are no cross-entropy. `index` counts the selected positions in order. By chunks, recomputed in
    the backward pass: the logits of a chunk are all that is held.
    """

    def priced(rows: Tensor, index: Tensor) -> Tensor:
        logits = head(rows)
        return price(logits if logits.dtype == torch.float64 else logits.float(), index)

    selected = hidden[where]
    size = max(1, LOGITS_AT_ONCE // head.out_features)
    chunks = zip(
        torch.split(selected, size), torch.split(torch.arange(len(selected), device=where.device), size), strict=True
    )
    prices = torch.cat([checkpoint(priced, rows, index, use_reentrant=False) for rows, index in chunks])
    return torch.zeros(where.shape, dtype=prices.dtype, device=where.device).masked_scatter(where, prices)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    token_weight: Tensor,
    excluded: int | None = None,
    rows: int | None = None,
) -> Scored:
    """sum_n w_n (logsumexp_v l_nv - l_n,target), l = hidden weight^T + bias, by chunks of `rows` tokens.

    Symbol `excluded` takes no part in the sum over v (SUBS: the mask has no mass). Under autocast the products run in
    its precision; logits, sums and the weights' gradients are float32, or float64 where everything is.
    """
    device = hidden.device.type
    lowered = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64  # which autocast leaves alone
    dtype = torch.get_autocast_dtype(device) if lowered else hidden.dtype
    rows = rows or max(1, LOGITS_AT_ONCE // weight.shape[0])
    differentiable = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        total, nats = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, token_weight, excluded, rows, dtype, differentiable
        )
    return Scored(total, nats)


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, token_weight: Tensor, excluded: int | None = None
) -> Scored:
    """`linear_cross_entropy` as it is written on paper, all logits at once: the oracle."""
    logits = hidden @ weight.T + bias
    if excluded is not None:
        logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), -torch.inf)
    nats = torch.logsumexp(logits, dim=-1) - logits.gather(-1, targets[:, None])[:, 0]
    return Scored((token_weight * nats).sum(), nats.detach())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        token_weight: Tensor,
        excluded: int | None,
        rows: int,
        dtype: torch.dtype,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        low_hidden, low_weight, precise_bias = hidden.to(dtype), weight.to(dtype), bias.to(precise)
        nats = torch.empty(len(targets), dtype=precise, device=hidden.device)
        gradients = None
        if differentiable:
            gradients = (
                torch.empty_like(low_hidden),
                torch.zeros_like(weight, dtype=precise),
                torch.zeros_like(bias, dtype=precise),
            )
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits = torch.mm(low_hidden[chunk], low_weight.T).to(precise).add_(precise_bias)
            if excluded is not None:
                logits[:, excluded] = -torch.inf
            log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            target = targets[chunk, None]
            nats[chunk] = (log_norm - logits.gather(-1, target))[:, 0]
            if gradients is not None:
                # d total / d logits = w (softmax - one-hot), written over the logits
                slope = logits.sub_(log_norm).exp_()
                slope.scatter_add_(-1, target, slope.new_full(target.shape, -1.0))
                slope.mul_(token_weight[chunk, None].to(precise))
                gradients[2].add_(slope.sum(dim=0))
                low_slope = slope.to(dtype)
                gradients[0][chunk] = torch.mm(low_slope, low_weight)
                gradients[1].add_(torch.mm(low_slope.T, low_hidden[chunk]))
        if gradients is not None:
            ctx.save_for_backward(*gradients)
            ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype)
        ctx.mark_non_differentiable(nats)
        return (token_weight.to(precise) * nats).sum(), nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_total: Tensor, _from_nats: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (gradient * from_total).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None, None)
