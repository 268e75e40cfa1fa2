"""Logits of some tokens -> the nats of their right answers, and what pulls on each logit. Knows nothing of heads.

d/dl of w (logsumexp l - l_target) is w (softmax l - one-hot of the target): the slope, written over the logits. On CUDA
a Triton kernel does both: each row is read from memory, read again from the cache, and written once. On an H200 that
took a tenth of the time of torch's own operations, each of which passes over all of them.

Shapes: N tokens, V symbols; a logit of -inf has no mass and no slope.
"""

import importlib.util
import os
import shutil
from functools import cache

import torch
from torch import Tensor


def logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """nats (N,), at least in float32; the logits (N, V) become their slopes if these are wanted."""
    if logits.is_cuda and logits.dtype != torch.float64 and not why_no_triton():
        return _fused(logits, targets, token_weight, differentiable)
    return plain_logit_gradients_(logits, targets, token_weight, differentiable)


def plain_logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """`slopes_` in torch's operations: the oracle, and what runs where there is no Triton."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    target = targets[:, None]
    log_norm = torch.logsumexp(precise, dim=-1, keepdim=True)
    nats = (log_norm - precise.gather(-1, target))[:, 0]
    if differentiable:
        slope = precise.sub_(log_norm).exp_()
        slope.scatter_add_(-1, target, slope.new_full(target.shape, -1.0))
        slope.mul_(token_weight[:, None].to(slope.dtype))
        if slope is not logits:
            logits.copy_(slope)
    return nats


@cache
def why_no_triton() -> str:
    """Empty where Triton can build a kernel; else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    named = os.environ.get("CC")
    if not any(shutil.which(compiler) for compiler in ([named] if named else ["gcc", "clang", "cc"])):
        return f"there is no C compiler ({named or 'gcc or clang'}) for Triton's launchers"
    return ""


def _fused(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    from adlm.models.logit_gradients_kernel import logit_gradients_kernel  # Triton is imported where it runs

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
