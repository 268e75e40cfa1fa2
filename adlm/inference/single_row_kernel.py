"""The Triton kernel of `one_row.py`. Knows nothing but pointers.

x is h, in float32, where it is normed first; else it is in the width of the products. Norms, gates and all sums are
float32. Where EARLY is set, a kernel is started before its predecessor has ended: it loads what no kernel of the same
token writes, lets its own successor start, and only then waits for all before it. Every kernel that is started so waits
before it writes.
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
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    ADDING: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for TOGETHER sums: their rows of the matrix are on their way before anything is waited for."""
    number, column = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    wanted, inside = number < num_sums, column < WIDTH
    at = number[:, None] * WIDTH + column[None, :]
    w = tl.load(weight + at, mask=wanted[:, None] & inside[None, :], other=0.0)
    if NORMED:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0)
        shift = tl.load(norm_shift + column, mask=inside, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        centred = tl.where(inside, v - tl.sum(v, 0) / WIDTH, 0.0)
        v = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + 1e-5) * scale + shift
        v = v.to(weight.dtype.element_ty).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if BIASED:
        total += tl.load(bias + number, mask=wanted, other=0.0).to(tl.float32)
    if GELU:  # x (1 + tanh u) / 2 = x / (1 + e^-2u)
        total = total * tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    if ADDING:
        gated = tl.load(gate + number, mask=wanted, other=0.0)
        total = tl.load(sums + number, mask=wanted, other=0.0) + gated * total
    tl.store(sums + number, total.to(sums.dtype.element_ty), mask=wanted)
