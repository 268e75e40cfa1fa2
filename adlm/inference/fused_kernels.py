"""The Triton kernels of `fused.py`. Know nothing but pointers.

h, norms, turns and all sums are float32; the rest is in the width of the products. Lengths are not specialised: a
kernel is not built again for a length that is no multiple of 16.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator,unused-ignore]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    h, added, gate, weight, shift, normed, length, width, modulation_stride, ADDING: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token: h <- h + gate * added; normed = (h - mean) / deviation * weight + shift."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    here, modulation = token * width + column, (token // length) * modulation_stride + column
    x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
    if ADDING:
        gated = tl.load(gate + modulation, mask=inside, other=0.0)
        x += gated * tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + here, x, mask=inside)
    centred = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + 1e-5)
    scaled = scaled * tl.load(weight + modulation, mask=inside, other=0.0)
    scaled += tl.load(shift + modulation, mask=inside, other=0.0)
    tl.store(normed + here, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator,unused-ignore]
def rotary_kernel(qkv, turns, length, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a token: every pair of its queries and keys is multiplied by its head's complex number."""
    token = tl.program_id(0).to(tl.int64)
    head, column, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :], 2 * tl.arange(0, WIDTH // 2)
    inside = (head < 2 * heads) & (column < width)
    at = qkv + token * 3 * heads * width + head * width + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    turn = turns + (token % length) * width + pair
    cos = tl.load(turn, mask=pair < width, other=0.0)[None, :]
    sin = tl.load(turn + 1, mask=pair < width, other=0.0)[None, :]
    turned = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos)
    tl.store(at, turned.to(qkv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["places"])  # type: ignore[untyped-decorator,unused-ignore]
def attend_one_token_kernel(  # type: ignore[no-untyped-def]
    qkv,
    turns,
    keys,
    values,
    position,
    parts,
    sums,
    arrivals,
    mixed,
    heads,
    places,
    width,
    scale,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row, head and PART places: the next token's query attends to those that are filled.

    Its key and value are kept by the program that has its place, and come to it from registers: what was just written
    is not read again. A part is left as its blend, the largest score and the sum of e^(score - largest); the program
    that arrives last at its row and head joins them. EARLY is told in `one_row_kernel`: only qkv is from a kernel
    that may still run.
    """
    row, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * PART
    here = tl.load(position)
    if first <= here:
        column, pair = tl.arange(0, WIDTH), 2 * tl.arange(0, WIDTH // 2)
        wide, paired = column < width, pair < width
        place, one = first + tl.arange(0, PART), row * heads + head
        kept = one * places * width
        at, known = kept + place[:, None] * width + column[None, :], (place < here)[:, None] & wide[None, :]
        earlier_keys = tl.load(keys + at, mask=known, other=0.0)
        earlier_values = tl.load(values + at, mask=known, other=0.0)
        cos = tl.load(turns + here * width + pair, mask=paired, other=0.0)
        sin = tl.load(turns + here * width + pair + 1, mask=paired, other=0.0)
        if EARLY:
            gdc_launch_dependents()
            gdc_wait()
        query = qkv + (3 * row * heads + head) * width
        key, value = query + heads * width, query + 2 * heads * width
        real = tl.load(query + pair, mask=paired, other=0.0)
        imaginary = tl.load(query + pair + 1, mask=paired, other=0.0)
        q = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos) * scale
        real = tl.load(key + pair, mask=paired, other=0.0)
        imaginary = tl.load(key + pair + 1, mask=paired, other=0.0)
        k = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos).to(keys.dtype.element_ty)
        v = tl.load(value + column, mask=wide, other=0.0)
        mine = wide & (here < first + PART)
        tl.store(keys + kept + here * width + column, k, mask=mine)
        tl.store(values + kept + here * width + column, v, mask=mine)
        itself = (place == here)[:, None]
        score = tl.sum(q[None, :] * tl.where(itself, k[None, :], earlier_keys).to(tl.float32), 1)
        score = tl.where(place <= here, score, -float("inf"))
        largest = tl.max(score, 0)
        share = tl.exp(score - largest)
        blend = tl.sum(share[:, None] * tl.where(itself, v[None, :], earlier_values).to(tl.float32), 0)
        part = one * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts + part * width + column, blend, mask=wide)
        tl.store(sums + 2 * part, largest)
        tl.store(sums + 2 * part + 1, tl.sum(share, 0))
        tl.debug_barrier()  # all of a part is written before it is counted
        if tl.atomic_add(arrivals + one, 1, sem="acq_rel") == here // PART:
            tl.store(arrivals + one, 0)
            joined = _joined(parts, sums, one * tl.num_programs(2), here // PART + 1, width, PARTS, WIDTH)
            tl.store(mixed + one * width + column, joined.to(mixed.dtype.element_ty), mask=wide)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _joined(parts, sums, first, num_parts, width, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blends of some parts in a row, each weighed by its share of all. Read from L2, as others wrote them."""
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    filled = part < num_parts
    largest = tl.load(sums + 2 * (first + part), mask=filled, other=-float("inf"), cache_modifier=".cg")
    weight = tl.exp(largest - tl.max(largest, 0))
    share = tl.load(sums + 2 * (first + part) + 1, mask=filled, other=0.0, cache_modifier=".cg")
    inside = filled[:, None] & (column < width)[None, :]
    blends = tl.load(
        parts + (first + part)[:, None] * width + column[None, :], mask=inside, other=0.0, cache_modifier=".cg"
    )
    return tl.sum(weight[:, None] * blends, 0) / tl.sum(weight * share, 0)
