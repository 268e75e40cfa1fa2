"""The Triton kernel of `single_row.py`.

With NORMED, x is the residual stream h in float32; else it has the dtype of the matrix products. Norms, gates and all
sums are float32. With DEPENDENT_LAUNCH (programmatic dependent launch) a kernel starts before its predecessor has
finished: it loads data that no kernel of the same token writes, allows its successor to start, and only then waits for
all its predecessors. Every kernel launched this way waits before it writes.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def single_row_kernel(  # type: ignore[no-untyped-def]
    x,
    norm_weight,
    norm_shift,
    weight,
    bias,
    gate,
    sums,
    num_sums,
    WIDTH: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    ADDING: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One program per PER_PROGRAM outputs; it loads their rows of the matrix before it waits for its predecessors."""
    number, column = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM), tl.arange(0, BLOCK)
    valid, inside = number < num_sums, column < WIDTH
    offset = number[:, None] * WIDTH + column[None, :]
    w = tl.load(weight + offset, mask=valid[:, None] & inside[None, :], other=0.0)
    if NORMED:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0)
        shift = tl.load(norm_shift + column, mask=inside, other=0.0)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        centred = tl.where(inside, v - tl.sum(v, 0) / WIDTH, 0.0)
        v = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + 1e-5) * scale + shift
        v = v.to(weight.dtype.element_ty).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if BIASED:
        total += tl.load(bias + number, mask=valid, other=0.0).to(tl.float32)
    if GELU:  # x (1 + tanh u) / 2 = x / (1 + e^-2u)
        total = total * tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    if ADDING:
        gated = tl.load(gate + number, mask=valid, other=0.0)
        total = tl.load(sums + number, mask=valid, other=0.0) + gated * total
    tl.store(sums + number, total.to(sums.dtype.element_ty), mask=valid)
