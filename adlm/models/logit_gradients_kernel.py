"""The Triton kernel of `logit_gradients_` in heads.py: one program per row."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def logit_gradients_kernel(  # type: ignore[no-untyped-def]
    logits, targets, weights, nats, stride, width, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """nats = logsumexp(l) - l_target; then l <- w (softmax l - one-hot)."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    target = tl.load(targets + row)
    # Each lane has its own running maximum and sum, so the loop needs no reduction across lanes. The maximum starts at
    # a finite value because -inf - -inf is NaN.
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(here + column, mask=column < width, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, logit)
        total = total * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
    top = tl.max(largest, 0)
    log_norm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(nats + row, log_norm - tl.load(here + target).to(tl.float32))
    if WITH_GRADIENT:
        weight = tl.load(weights + row)
        tl.debug_barrier()  # the target's logit is read before its gradient overwrites it
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(here + column, mask=column < width, other=-float("inf")).to(tl.float32)
            gradient = weight * (tl.exp(logit - log_norm) - tl.where(column == target, 1.0, 0.0))
            tl.store(here + column, gradient.to(logits.dtype.element_ty), mask=column < width)
