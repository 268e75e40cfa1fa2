"""The Triton kernels of `fused.py`. Know nothing but pointers.

h is float32; all else is in the width of the products, but norms and turns are float32. Sums are float32.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    h, added, gate, weight, shift, normed, length, width, modulation_stride, ADDING: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token: h <- h + gate * added; normed = (h - mean) / deviation * weight + shift."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    here, modulation = token * width + column, (token // length) * modulation_stride + column
    x = tl.load(h + here, mask=inside, other=0.0)
    if ADDING:
        gated = tl.load(gate + modulation, mask=inside, other=0.0)
        x += gated * tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + here, x, mask=inside)
    centred = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + 1e-5)
    scaled = scaled * tl.load(weight + modulation, mask=inside, other=0.0)
    scaled += tl.load(shift + modulation, mask=inside, other=0.0)
    tl.store(normed + here, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def turn_kernel(qkv, turns, length, width, head_width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a token: every pair of its queries and keys is multiplied by its head's complex number."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    inside = number < 2 * width
    at = qkv + token * 3 * width + number
    real, imaginary = tl.split(tl.reshape(tl.load(at, mask=inside, other=0.0).to(tl.float32), (BLOCK // 2, 2)))
    turn = turns + (token % length) * head_width + 2 * tl.arange(0, BLOCK // 2) % head_width
    cos, sin = tl.load(turn), tl.load(turn + 1)
    turned = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos)
    tl.store(at, turned.to(qkv.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def attend_next_kernel(  # type: ignore[no-untyped-def]
    qkv, turns, keys, values, position, mixed, heads, places, width, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row and head: the next token's key and value are kept, and its query attends to all so far."""
    row, head, here = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.load(position)
    column, pair = tl.arange(0, WIDTH), 2 * tl.arange(0, WIDTH // 2)
    wide, paired = column < width, pair < width
    cos = tl.load(turns + here * width + pair, mask=paired, other=0.0)
    sin = tl.load(turns + here * width + pair + 1, mask=paired, other=0.0)
    query = qkv + (3 * row * heads + head) * width
    key, value = query + heads * width, query + 2 * heads * width
    real, imaginary = tl.load(query + pair, mask=paired, other=0.0), tl.load(query + pair + 1, mask=paired, other=0.0)
    q = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos) * scale
    real, imaginary = tl.load(key + pair, mask=paired, other=0.0), tl.load(key + pair + 1, mask=paired, other=0.0)
    k = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos).to(keys.dtype.element_ty)
    v = tl.load(value + column, mask=wide, other=0.0)
    kept = (row * heads + head) * places * width
    tl.store(keys + kept + here * width + column, k, mask=wide)
    tl.store(values + kept + here * width + column, v, mask=wide)
    # The token itself comes from registers: what was just written is not read again.
    largest = tl.sum(q * k.to(tl.float32), 0)
    total, blend = 1.0, v.to(tl.float32)
    for start in range(0, here, BLOCK):
        place = start + tl.arange(0, BLOCK)
        at, known = kept + place[:, None] * width + column[None, :], (place < here)[:, None] & wide[None, :]
        score = tl.sum(q[None, :] * tl.load(keys + at, mask=known, other=0.0).to(tl.float32), 1)
        score = tl.where(place < here, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 0))
        share, shrunk = tl.exp(score - larger), tl.exp(largest - larger)
        blend = blend * shrunk + tl.sum(share[:, None] * tl.load(values + at, mask=known, other=0.0).to(tl.float32), 0)
        total = total * shrunk + tl.sum(share, 0)
        largest = larger
    tl.store(mixed + (row * heads + head) * width + column, (blend / total).to(mixed.dtype.element_ty), mask=wide)
