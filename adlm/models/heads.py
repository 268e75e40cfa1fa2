"""Hidden states -> nats at the positions that count, without ever holding all logits. Knows nothing of trunks.

Shapes: N selected tokens, d wide, V symbols; B sequences of L tokens before selection.

A head turns d numbers into V = 50,258. For a batch of 32 x 1024 tokens all logits are 6.6 GB in float32, and several
such tensors live at once in a plain backward pass. Here logits exist for a chunk of tokens at a time, and because the
weight of every token is known beforehand the gradients are formed in the same pass: three products in all, as in the
plain form, and nothing is computed twice. On a GPU the vocabulary is filled up, inside, to a multiple of 128 symbols
that have no mass: with rows of 50,258 numbers the products ran at a third of the speed of rows of 50,304.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from adlm.models.logit_gradients import logit_gradients_

LOGITS_AT_ONCE = 2**27  # 512 MB of float32, about 2,700 tokens with GPT-2's vocabulary; twice as many in 16 bits
SYMBOLS_TOGETHER = 128


@dataclass(frozen=True)
class Scored:
    """What a head says of the right answers."""

    total: Tensor
    """Sum over tokens of weight * nats, a scalar: what is differentiated."""
    nats: Tensor
    """-log p of each token's right answer, 0 where its weight is 0; carries no gradient."""


class Positions:
    """Where a weight (B, L) is not 0: how many places that is, and which.

    The number is asked for at once and waited for when it is used. Between the two the host gives a GPU the work of the
    trunks, and the GPU never stands still for the answer.
    """

    def __init__(self, weight: Tensor):
        self.selected = (weight != 0).flatten()
        if self.selected.is_cuda:
            self._num = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._num.copy_(self.selected.sum(), non_blocking=True)
            self._told = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._told.record(torch.cuda.current_stream(weight.device))  # which need not be the current device

    def index(self) -> Tensor:
        """(N,), the places in order, counted along the batch."""
        if not self.selected.is_cuda:
            return self.selected.nonzero()[:, 0]
        self._told.synchronize()
        return torch.nonzero_static(self.selected, size=int(self._num))[:, 0]


def score_positions(
    hidden: Tensor,
    head: nn.Linear,
    x: Tensor,
    weight: Tensor,
    excluded: int | None = None,
    positions: Positions | None = None,
) -> Scored:
    """`linear_cross_entropy` of a head over hidden (B, L, d) at the positions whose weight (B, L) is not 0."""
    index = (positions or Positions(weight)).index()
    rows, targets, token_weight = (
        part.index_select(0, index) for part in (hidden.flatten(0, 1), x.flatten(), weight.flatten())
    )
    scored = linear_cross_entropy(rows, head.weight, head.bias, targets, token_weight, excluded)
    nats = torch.zeros(x.numel(), dtype=scored.nats.dtype, device=x.device).index_copy(0, index, scored.nats)
    return Scored(scored.total, nats.view(x.shape))


def nats_at_positions(
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


@torch.no_grad()
def start_from_unigram(network: nn.Module, log_chances: Tensor) -> None:
    """Every head of a fresh network believes exp(log_chances) (V,), whatever it is shown: its weights start at 0.

    A head whose bias starts at 0 learns the frequencies first, from the one vector that all masked places share; that
    vector grows, the norms then leave little of what tells places apart, and the bound stands at the unigrams for long.
    The biases are against a uniform guess over all symbols but the mask, which changes no belief: SEDD's scores sum as
    they must from there.
    """
    for name, layer in network.named_modules():
        if name.rpartition(".")[2] == "head":
            assert isinstance(layer, nn.Linear)
            layer.bias.copy_(log_chances + math.log(len(log_chances) - 1))


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
    its precision, as those of a plain head do; sums, nats and the weights' gradients are float32, or float64 where
    everything is.
    """
    device = hidden.device.type
    lowered = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64  # which autocast leaves alone
    dtype = torch.get_autocast_dtype(device) if lowered else hidden.dtype
    rows = rows or max(1, LOGITS_AT_ONCE * 4 // dtype.itemsize // weight.shape[0])
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
        low_hidden, low_weight, low_bias = hidden.to(dtype), *_filled_up(weight, bias, excluded, dtype)
        nats = torch.empty(len(targets), dtype=precise, device=hidden.device)
        gradients = None
        if differentiable:
            gradients = (
                torch.empty_like(low_hidden),
                torch.zeros_like(low_weight, dtype=precise),
                torch.zeros_like(low_bias, dtype=precise),
            )
        at_once = low_hidden.new_empty((min(rows, len(targets)), len(low_bias)))
        for chunk in _even_chunks(len(targets), rows):
            logits = at_once[: chunk.stop - chunk.start]
            torch.addmm(low_bias, low_hidden[chunk], low_weight.T, out=logits)
            nats[chunk] = logit_gradients_(logits, targets[chunk], token_weight[chunk], differentiable)
            if gradients is not None:
                gradients[0][chunk] = torch.mm(logits, low_weight)
                _add_product_(gradients[1], logits.T, low_hidden[chunk])
                gradients[2].add_(logits.sum(dim=0, dtype=precise))
        if gradients is not None:
            symbols = len(bias)
            ctx.save_for_backward(gradients[0], gradients[1][:symbols], gradients[2][:symbols])
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


def _even_chunks(num: int, rows: int) -> Iterator[slice]:
    """0 to num in as few chunks of at most `rows` as will do, all about as long: a short product wastes the device."""
    chunks = math.ceil(num / rows)
    for chunk in range(chunks):
        yield slice(num * chunk // chunks, num * (chunk + 1) // chunks)


def _filled_up(weight: Tensor, bias: Tensor, excluded: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The head in `dtype`, its symbols filled up with ones that have no mass, as the excluded symbol has none."""
    symbols, together = len(bias), SYMBOLS_TOGETHER if weight.is_cuda else 1
    filling = -symbols % together
    low_bias = bias.new_full((symbols + filling,), -torch.inf, dtype=dtype)
    low_bias[:symbols] = bias
    if excluded is not None:
        low_bias[excluded].fill_(-torch.inf)  # setting an item would copy the number from the host, and wait
    if not filling:
        return weight.to(dtype), low_bias
    low_weight = weight.new_zeros((symbols + filling, weight.shape[1]), dtype=dtype)
    low_weight[:symbols] = weight
    return low_weight, low_bias


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum kept in total's precision; on CUDA inside the product, elsewhere after it."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, total.dtype, out=total)
    elif total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total.add_(torch.mm(a, b))
