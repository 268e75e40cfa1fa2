"""Cross-entropy of logits and its gradient with respect to the logits, in place. Independent of heads.

d/dl of w (logsumexp l - l_target) is w (softmax l - one-hot of the target); it overwrites the logits. On CUDA a Triton
kernel computes both: each row is read from memory, read again from the cache, and written once. On an H200 this took a
tenth of the time of the PyTorch operations, each of which reads and writes all logits.

Shapes: N tokens, V symbols; a logit of -inf has probability 0 and gradient 0.
"""

import importlib.util
import os
import shutil
from functools import cache

import torch
from torch import Tensor


def logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """nats (N,) in float32 or float64; with `differentiable`, the logits (N, V) are overwritten by their gradients."""
    if logits.is_cuda and logits.dtype != torch.float64 and not why_no_triton():
        return _fused(logits, targets, token_weight, differentiable)
    return plain_logit_gradients_(logits, targets, token_weight, differentiable)


def plain_logit_gradients_(logits: Tensor, targets: Tensor, token_weight: Tensor, differentiable: bool) -> Tensor:
    """`logit_gradients_` in PyTorch operations: the test oracle, and the fallback without Triton."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    target = targets[:, None]
    log_norm = torch.logsumexp(precise, dim=-1, keepdim=True)
    nats = (log_norm - precise.gather(-1, target))[:, 0]
    if differentiable:
        gradient = precise.sub_(log_norm).exp_()
        gradient.scatter_add_(-1, target, gradient.new_full(target.shape, -1.0))
        gradient.mul_(token_weight[:, None].to(gradient.dtype))
        if gradient is not logits:
            logits.copy_(gradient)
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
