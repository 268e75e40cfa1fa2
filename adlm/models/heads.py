"""Hidden states -> per-token nats at selected positions, without ever holding all logits. Independent of the trunk.

For a batch of 32 x 1024 tokens and V = 50,258, all logits take 6.6 GB in float32, and a plain backward pass holds
several such tensors at once. Here logits exist for one chunk of tokens at a time. The weight of each token is known in
advance, so the gradients are computed in the same pass: three matrix products in total, as in the plain form, and no
recomputation. On CUDA the vocabulary is padded internally to a multiple of 128 with symbols of zero probability: the
products with 50,258 columns ran at a third of the speed of those with 50,304.

d/dl of w (logsumexp l - l_target) is w (softmax l - one-hot of the target); it overwrites the logits. On CUDA a Triton
kernel computes both: each row is read from memory, read again from the cache, and written once. On an H200 this took a
tenth of the time of the PyTorch operations, each of which reads and writes all logits.

Targets are ids, or states: then the target is the distribution p that the same head predicts from them, without a
gradient, and p takes the place of the one-hot.

Shapes: N selected tokens, d wide, V symbols; B sequences of L tokens before selection.
"""

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**27  # per chunk: 512 MB of float32, about 2,700 tokens with GPT-2's vocabulary; twice as many in 16 bits
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True)
class Scored:
    """The weighted cross-entropy of a head."""

    total: Tensor
    """Sum over tokens of weight * nats: a scalar with a gradient."""
    nats: Tensor
    """-log p(target) of each token, or its mean over a target distribution, not multiplied by the token's weight; 0
    where a batch's weight (B, L) is 0; detached."""
    causal: "Scored | None" = None
    """Of block-causal networks, if it was asked for: the cross-entropy of the next token after the clean text."""
    chained: "Scored | None" = None
    """The same, of the tokens of a block given those before them in it, by the chain."""
    log_rates: Tensor | None = None
    """(B, L), of networks that predict how soon masked tokens are revealed; with a gradient."""
    misalignment: Tensor | None = None
    """Of block-causal networks, if it was asked for: see `Places.misalignment`; a scalar with a gradient."""


@dataclass(frozen=True)
class Planner:
    """More weight for masked tokens that a head expects, which are revealed early by orders of confidence."""

    strength: float
    temperature: float

    @torch.no_grad()
    def weight(self, weight: Tensor, nats: Tensor) -> Tensor:
        """The weight (B, L) of masks, with a factor 1 + strength * share; the shares of a row have mean 1.

        A mask's share is in proportion to p(token)^(1 / temperature), where nats (B, L) are -log p.
        """
        masked = weight != 0
        shares = (-nats / self.temperature).masked_fill(~masked, -torch.inf).softmax(dim=1)
        shares = torch.where(masked, shares * masked.sum(dim=1, keepdim=True), 0.0)  # a row without masks has NaN
        return weight * (1 + self.strength * shares)


class TiedHead(nn.Module):
    """A head with a bias of its own and the weight of another head or of the embedding, a parameter of that alone."""

    def __init__(self, other: "nn.Linear | nn.Embedding | TiedHead"):
        super().__init__()
        weight = other.weight
        self.bias = nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
        self._other = (other,)  # in a tuple: as a submodule its weight would be listed, saved and sharded twice

    @property
    def weight(self) -> Tensor:
        return self._other[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


Head = nn.Linear | TiedHead


class Positions:
    """The positions where a weight (B, L) is not 0.

    On CUDA the number of positions is copied to the host asynchronously when this object is created and awaited only
    in `index`, so that the host can launch the trunk's kernels in between instead of synchronizing first.
    """

    def __init__(self, weight: Tensor):
        self.selected = (weight != 0).flatten()
        if self.selected.is_cuda:
            self._num_selected = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._num_selected.copy_(self.selected.sum(), non_blocking=True)
            self._num_is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._num_is_copied.record(torch.cuda.current_stream(weight.device))  # not necessarily the current device

    def index(self) -> Tensor:
        """(N,), the selected positions in order, as indices into the flattened batch."""
        if not self.selected.is_cuda:
            return self.selected.nonzero()[:, 0]
        self._num_is_copied.synchronize()
        return torch.nonzero_static(self.selected, size=int(self._num_selected))[:, 0]


def score_positions(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    weight: Tensor,
    excluded: int | None = None,
    positions: Positions | None = None,
) -> Scored:
    """`linear_cross_entropy` of a head over hidden (B, L, d) at the positions whose weight (B, L) is not 0.

    Targets are ids (B, L) or states (B, L, d).
    """
    index = (positions or Positions(weight)).index()
    rows, selected, token_weight = (part.flatten(0, 1).index_select(0, index) for part in (hidden, targets, weight))
    scored = linear_cross_entropy(rows, head.weight, head.bias, selected, token_weight, excluded)
    nats = torch.zeros(weight.numel(), dtype=scored.nats.dtype, device=weight.device)
    return Scored(scored.total, nats.index_copy(0, index, scored.nats).view(weight.shape))


def nats_at_positions(
    hidden: Tensor, head: Head, where: Tensor, objective: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(B, L): `objective(logits (n, V), index (n,))` at the positions `where` (B, L), 0 elsewhere.

    For objectives other than the cross-entropy. `index` numbers the selected positions in order. Computed in chunks,
    recomputed in the backward pass: only one chunk of logits exists at a time.
    """

    def chunk_nats(rows: Tensor, index: Tensor) -> Tensor:
        logits = head(rows)
        return objective(logits if logits.dtype == torch.float64 else logits.float(), index)

    selected = hidden[where]
    size = max(1, MAX_LOGITS // len(head.bias))
    chunks = zip(
        torch.split(selected, size), torch.split(torch.arange(len(selected), device=where.device), size), strict=True
    )
    nats = torch.cat([checkpoint(chunk_nats, rows, index, use_reentrant=False) for rows, index in chunks])
    return torch.zeros(where.shape, dtype=nats.dtype, device=where.device).masked_scatter(where, nats)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    token_weight: Tensor,
    excluded: int | None = None,
    rows: int | None = None,
) -> Scored:
    """sum_n w_n (logsumexp_v l_nv - l_n,target), l = hidden weight^T + bias, in chunks of `rows` tokens.

    Targets are ids (N,). For states s (N, d) it is -sum_n w_n sum_v p_nv log softmax(l_n)_v, where p is the softmax of
    s weight^T + bias, a constant. Symbol `excluded` is left out of the sums over v (SUBS: the mask has probability 0).
    Under autocast the matrix products run in the autocast dtype, as for an nn.Linear; sums, nats and weight gradients
    are float32, or float64 for float64 inputs.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64  # autocast does not affect float64
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    max_logits = MAX_LOGITS * 4 // dtype.itemsize // (4 if targets.dim() == 2 else 1)  # p and q in float32 beside them
    rows = rows or max(1, max_logits // weight.shape[0])
    differentiable = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        total, nats = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, token_weight, excluded, rows, dtype, differentiable
        )
    return Scored(total, nats)


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, token_weight: Tensor, excluded: int | None = None
) -> Scored:
    """`linear_cross_entropy` with all logits at once: the test oracle."""
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
        low_hidden, low_weight, low_bias = hidden.to(dtype), *_padded_head(weight, bias, excluded, dtype)
        nats = torch.empty(len(targets), dtype=precise, device=hidden.device)
        gradient = torch.empty_like(low_hidden) if differentiable else None
        head_gradients = None
        if differentiable and any(ctx.needs_input_grad[1:3]):  # a head that LoRA freezes needs none
            head_gradients = tuple(torch.zeros_like(each, dtype=precise) for each in (low_weight, low_bias))
        buffer = low_hidden.new_empty((min(rows, len(targets)), len(low_bias)))
        for chunk in _even_chunks(len(targets), rows):
            logits = buffer[: chunk.stop - chunk.start]
            torch.addmm(low_bias, low_hidden[chunk], low_weight.T, out=logits)
            if targets.dim() == 2:
                target_logits = torch.addmm(low_bias, targets[chunk].to(dtype), low_weight.T)
                nats[chunk] = soft_logit_gradients_(logits, target_logits, token_weight[chunk], differentiable)
            else:
                nats[chunk] = logit_gradients_(logits, targets[chunk], token_weight[chunk], differentiable)
            if gradient is not None:
                gradient[chunk] = torch.mm(logits, low_weight)
            if head_gradients is not None:
                _add_product_(head_gradients[0], logits.T, low_hidden[chunk])
                head_gradients[1].add_(logits.sum(dim=0, dtype=precise))
        if gradient is not None:
            ctx.save_for_backward(gradient, *(each[: len(bias)] for each in head_gradients or ()))
            ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype)
        ctx.mark_non_differentiable(nats)
        return (token_weight.to(precise) * nats).sum(), nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_gradient: Tensor, _nats_gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (gradient * total_gradient).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)  # a frozen head has no gradients
        ]
        return (*scaled, *[None] * (9 - len(scaled)))


def _even_chunks(num: int, rows: int) -> Iterator[slice]:
    """range(num) in the fewest chunks of at most `rows`, of nearly equal size: a small last chunk is inefficient."""
    chunks = math.ceil(num / rows)
    for chunk in range(chunks):
        yield slice(num * chunk // chunks, num * (chunk + 1) // chunks)


def _padded_head(weight: Tensor, bias: Tensor, excluded: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The head in `dtype`, padded with symbols of zero probability; the excluded symbol gets zero probability too."""
    symbols = len(bias)
    padding = -symbols % VOCABULARY_MULTIPLE if weight.is_cuda else 0
    low_bias = bias.new_full((symbols + padding,), -torch.inf, dtype=dtype)
    low_bias[:symbols] = bias
    if excluded is not None:
        low_bias[excluded].fill_(-torch.inf)  # item assignment would copy from the host and synchronize
    if not padding:
        return weight.to(dtype), low_bias
    low_weight = weight.new_zeros((symbols + padding, weight.shape[1]), dtype=dtype)
    low_weight[:symbols] = weight
    return low_weight, low_bias


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in total's dtype; on CUDA accumulated inside the product, elsewhere after it."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, total.dtype, out=total)
    elif total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total.add_(torch.mm(a, b))


def logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """nats (N,) in float32 or float64; with `differentiable`, the logits (N, V) are overwritten by their gradients.

    A logit of -inf has probability 0 and gradient 0.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and not why_no_triton():
        return _fused(logits, targets, token_weight, differentiable)
    return plain_logit_gradients_(logits, targets, token_weight, differentiable)


def plain_logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """`logit_gradients_` in PyTorch operations: the test oracle, and the fallback without Triton."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    target = targets[:, None]
    if not differentiable:
        return torch.logsumexp(precise, dim=-1) - precise.gather(-1, target)[:, 0]
    shifted = precise.sub_(precise.amax(dim=-1, keepdim=True))
    log_chance = shifted.gather(-1, target)
    sums = shifted.exp_().sum(dim=-1, keepdim=True)
    weight = token_weight[:, None].to(sums.dtype)
    gradient = shifted.mul_(weight / sums).scatter_add_(-1, target, -weight)
    if gradient is not logits:
        logits.copy_(gradient)
    return (sums.log() - log_chance)[:, 0]


def soft_logit_gradients_(logits: Tensor, target_logits: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """`logit_gradients_` where nats = -sum_v p_v log q_v, p = softmax(target_logits (N, V)), q = softmax(logits).

    The logits of a symbol are -inf in both or in neither.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    p = torch.softmax(target_logits, dim=-1, dtype=dtype)
    log_q = torch.log_softmax(logits, dim=-1, dtype=dtype).clamp_(min=torch.finfo(dtype).min)  # 0 * -inf is NaN
    nats = -(p * log_q).sum(dim=-1)
    if differentiable:
        logits.copy_(log_q.exp_().sub_(p).mul_(token_weight[:, None].to(dtype)))
    return nats


@cache
def why_no_triton() -> str:
    """The reason why Triton cannot compile kernels here; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    named = os.environ.get("CC")
    if not any(shutil.which(compiler) for compiler in ([named] if named else ["gcc", "clang", "cc"])):
        return f"there is no C compiler ({named or 'gcc or clang'}) for Triton's launchers"
    return ""


def _fused(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    from adlm.models.logit_gradients_kernel import logit_gradients_kernel  # Triton is imported only where it is used

    nats = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device(logits.device):
            logit_gradients_kernel[(len(logits),)](
                logits,
                targets,
                token_weight.float(),
                nats,
                logits.stride(0),
                logits.shape[1],
                differentiable,
                4096,
                num_warps=16,
            )
    return nats
