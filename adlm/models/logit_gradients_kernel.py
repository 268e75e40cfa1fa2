"""The Triton kernel of `slopes.py`: one program a row. Knows nothing but pointers."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def logit_gradients_kernel(  # type: ignore[no-untyped-def]
    logits, targets, weights, nats, stride, width, WITH_SLOPE: tl.constexpr, BLOCK: tl.constexpr
):
    """nats = logsumexp(l) - l_target; then l <- w (softmax l - one-hot)."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    target = tl.load(targets + row)
    # Every lane keeps its own maximum and its own sum, so that the loop needs no exchange between lanes; from a finite
    # floor, because -inf minus -inf is not a number.
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(here + at, mask=at < width, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, logit)
        total = total * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
    top = tl.max(largest, 0)
    log_norm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(nats + row, log_norm - tl.load(here + target).to(tl.float32))
    if WITH_SLOPE:
        weight = tl.load(weights + row)
        tl.debug_barrier()  # the target's logit is read before its slope is written over it
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logit = tl.load(here + at, mask=at < width, other=-float("inf")).to(tl.float32)
            slope = weight * (tl.exp(logit - log_norm) - tl.where(at == target, 1.0, 0.0))
            tl.store(here + at, slope.to(logits.dtype.element_ty), mask=at < width)
