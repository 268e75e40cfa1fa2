"""The Triton kernels of `fused_ops.py`.

h, norms, rotary tables and all sums are float32; the rest has the dtype of the matrix products. Lengths are not
specialised, so a kernel is not recompiled for a length that is not a multiple of 16.

With DEPENDENT_LAUNCH (programmatic dependent launch) a kernel starts before its predecessor has finished: it loads data
that no kernel of the same token writes, allows its successor to start, and only then waits for all its predecessors.
Every kernel launched this way waits before it writes.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator,unused-ignore]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    h,
    added,
    gate,
    weight,
    shift,
    normed,
    length,
    width,
    modulation_stride,
    epsilon,
    ADDING: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token: h <- h + gate * added; normed = (h - mean) / deviation * weight + shift.

    Without CENTRED, the mean is not subtracted (RMSNorm).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    here, modulation = token * width + column, (token // length) * modulation_stride + column
    x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
    if ADDING:
        gated = tl.load(gate + modulation, mask=inside, other=0.0)
        x += gated * tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + here, x, mask=inside)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    scaled = scaled * tl.load(weight + modulation, mask=inside, other=0.0)
    scaled += tl.load(shift + modulation, mask=inside, other=0.0)
    tl.store(normed + here, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator,unused-ignore]
def rotary_kernel(qkv, rotary, length, heads, rotated_heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per token: every pair of coordinates of its queries and keys is multiplied by a complex number.

    These are the first `rotated_heads` of its `heads`.
    """
    token = tl.program_id(0).to(tl.int64)
    head, column, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :], 2 * tl.arange(0, WIDTH // 2)
    inside = (head < rotated_heads) & (column < width)
    at = qkv + token * heads * width + head * width + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    angle = rotary + (token % length) * width + pair
    cos = tl.load(angle, mask=pair < width, other=0.0)[None, :]
    sin = tl.load(angle + 1, mask=pair < width, other=0.0)[None, :]
    rotated = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos)
    tl.store(at, rotated.to(qkv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator,unused-ignore]
def attend_cached_kernel(  # type: ignore[no-untyped-def]
    qkv,
    rotary,
    keys,
    values,
    position,
    parts,
    sums,
    arrivals,
    mixed,
    heads,
    kv_heads,
    capacity,
    width,
    scale,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One program per row, head and PART positions of the cache: the new token's query attends to the filled ones.

    The program whose part contains the new position writes the new key and value to the cache, and uses them from
    registers instead of reading them back; programs of query heads that share a key head write the same numbers. Each
    program stores its weighted sum of values, its largest score and its sum of e^(score - largest); the last program
    to finish for its row and head combines the parts.
    DEPENDENT_LAUNCH is explained in `single_row_kernel`: only qkv is written by a kernel that may still be running.
    """
    row, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * PART
    here = tl.load(position + row)
    if first <= here:
        column, pair = tl.arange(0, WIDTH), 2 * tl.arange(0, WIDTH // 2)
        wide, paired = column < width, pair < width
        slot, row_head = first + tl.arange(0, PART), row * heads + head
        kv_head = head // (heads // kv_heads)
        cached = (row * kv_heads + kv_head) * capacity * width
        at, known = cached + slot[:, None] * width + column[None, :], (slot < here)[:, None] & wide[None, :]
        earlier_keys = tl.load(keys + at, mask=known, other=0.0)
        earlier_values = tl.load(values + at, mask=known, other=0.0)
        cos = tl.load(rotary + here * width + pair, mask=paired, other=0.0)
        sin = tl.load(rotary + here * width + pair + 1, mask=paired, other=0.0)
        if DEPENDENT_LAUNCH:
            gdc_launch_dependents()
            gdc_wait()
        token = qkv + row * (heads + 2 * kv_heads) * width
        query, key = token + head * width, token + (heads + kv_head) * width
        value = key + kv_heads * width
        real = tl.load(query + pair, mask=paired, other=0.0)
        imaginary = tl.load(query + pair + 1, mask=paired, other=0.0)
        q = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos) * scale
        real = tl.load(key + pair, mask=paired, other=0.0)
        imaginary = tl.load(key + pair + 1, mask=paired, other=0.0)
        k = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos).to(keys.dtype.element_ty)
        v = tl.load(value + column, mask=wide, other=0.0)
        is_owner = wide & (here < first + PART)
        tl.store(keys + cached + here * width + column, k, mask=is_owner)
        tl.store(values + cached + here * width + column, v, mask=is_owner)
        is_new = (slot == here)[:, None]
        score = tl.sum(q[None, :] * tl.where(is_new, k[None, :], earlier_keys).to(tl.float32), 1)
        score = tl.where(slot <= here, score, -float("inf"))
        largest = tl.max(score, 0)
        share = tl.exp(score - largest)
        partial = tl.sum(share[:, None] * tl.where(is_new, v[None, :], earlier_values).to(tl.float32), 0)
        part = row_head * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts + part * width + column, partial, mask=wide)
        tl.store(sums + 2 * part, largest)
        tl.store(sums + 2 * part + 1, tl.sum(share, 0))
        tl.debug_barrier()  # the part is written completely before it is counted
        if tl.atomic_add(arrivals + row_head, 1, sem="acq_rel") == here // PART:
            tl.store(arrivals + row_head, 0)
            combined = _combine_parts(parts, sums, row_head * tl.num_programs(2), here // PART + 1, width, PARTS, WIDTH)
            tl.store(mixed + row_head * width + column, combined.to(mixed.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator,unused-ignore]
def attend_open_kernel(  # type: ignore[no-untyped-def]
    qkv,
    rotary,
    visible,
    visible_stride,
    keys,
    values,
    position,
    parts,
    sums,
    arrivals,
    mixed,
    num,
    heads,
    kv_heads,
    capacity,
    width,
    scale,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    NEW: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """`attend_cached_kernel` for `num` new tokens of a row, at most NEW: they attend to the filled cache, and to those
    of themselves that are `visible`. One program per row and QUERIES queries that share a key head; with SPLIT one for
    each PART of the cache too, and one for the new tokens, of which the last to finish combines them.

    The queries of a key head are those of all new tokens and of its GROUP heads. The first program that reads the new
    tokens of a key head writes them to the cache.
    """
    row, tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_parts, here = tl.num_programs(2), tl.load(position + row)
    first, stop, reads_new = 0, here, True
    if SPLIT:
        first, reads_new = part * PART, part == num_parts - 1
        stop = tl.where(reads_new, 0, tl.minimum(first + PART, here))
    if reads_new | (first < here):
        kv_head, number = tile % kv_heads, (tile // kv_heads) * QUERIES + tl.arange(0, QUERIES)
        column, pair = tl.arange(0, WIDTH), 2 * tl.arange(0, WIDTH // 2)
        wide, paired = column < width, pair < width
        valid, token, head = number < num * GROUP, row * num + number // GROUP, kv_head * GROUP + number % GROUP
        cached = (row * kv_heads + kv_head) * capacity * width
        if DEPENDENT_LAUNCH:
            gdc_launch_dependents()
            gdc_wait()
        stride = (heads + 2 * kv_heads) * width
        q = _rotated(qkv + token * stride + head * width, rotary + token * width, valid, column, pair, wide, paired)
        largest, share = tl.full((QUERIES,), -float("inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
        total = tl.zeros((QUERIES, WIDTH), tl.float32)
        for begin in range(first, stop, PART):
            slot = begin + tl.arange(0, PART)
            at, known = cached + slot[:, None] * width + column[None, :], slot < here
            k = tl.load(keys + at, mask=known[:, None] & wide[None, :], other=0.0)
            v = tl.load(values + at, mask=known[:, None] & wide[None, :], other=0.0)
            seen = known[None, :] | (number < 0)[:, None]
            largest, share, total = _attend_to(q, k, v, seen, scale, largest, share, total)
        if reads_new:
            new = tl.arange(0, NEW)
            inside, source = new < num, row * num + new
            key = qkv + source * stride + (heads + kv_head) * width
            new_k = _rotated(key, rotary + source * width, inside, column, pair, wide, paired)
            is_value = inside[:, None] & wide[None, :]
            new_v = tl.load((key + kv_heads * width)[:, None] + column[None, :], mask=is_value, other=0.0)
            slots = cached + (here + new)[:, None] * width + column[None, :]
            writes = is_value & (here + new < capacity)[:, None] & (tile < kv_heads)
            tl.store(keys + slots, new_k, mask=writes)
            tl.store(values + slots, new_v, mask=writes)
            rule = row * visible_stride + (number // GROUP)[:, None] * num + new[None, :]
            among_new = tl.load(visible + rule, mask=valid[:, None] & inside[None, :], other=0) != 0
            among_new = among_new | (number >= num * GROUP)[:, None]  # rows without a query attend to anything
            largest, share, total = _attend_to(q, new_k, new_v, among_new, scale, largest, share, total)
        target = mixed + (token * heads + head)[:, None] * width + column[None, :]
        is_result = valid[:, None] & wide[None, :]
        if SPLIT:
            query, out = tl.arange(0, QUERIES), (row * tl.num_programs(1) + tile) * num_parts
            own = (out + part) * QUERIES + query
            tl.store(parts + own[:, None] * WIDTH + column[None, :], total)
            tl.store(sums + 2 * own, largest)
            tl.store(sums + 2 * own + 1, share)
            tl.debug_barrier()  # the part is written completely before it is counted
            num_cached = tl.cdiv(here, PART)
            if tl.atomic_add(arrivals + row * heads + tile, 1, sem="acq_rel") == num_cached:
                tl.store(arrivals + row * heads + tile, 0)
                all_largest = tl.full((QUERIES,), -float("inf"), tl.float32)
                all_share, combined = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, WIDTH), tl.float32)
                for number_of_part in range(num_cached + 1):
                    at_part = out + tl.where(number_of_part == num_cached, num_parts - 1, number_of_part)
                    theirs = at_part * QUERIES + query
                    their_largest = tl.load(sums + 2 * theirs, cache_modifier=".cg")
                    new_largest = tl.maximum(all_largest, their_largest)
                    old, added = tl.exp(all_largest - new_largest), tl.exp(their_largest - new_largest)
                    all_share = all_share * old + tl.load(sums + 2 * theirs + 1, cache_modifier=".cg") * added
                    their_total = tl.load(parts + theirs[:, None] * WIDTH + column[None, :], cache_modifier=".cg")
                    combined = combined * old[:, None] + their_total * added[:, None]
                    all_largest = new_largest
                tl.store(target, (combined / all_share[:, None]).to(mixed.dtype.element_ty), mask=is_result)
        else:
            tl.store(target, (total / share[:, None]).to(mixed.dtype.element_ty), mask=is_result)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotated(rows, angles, valid, column, pair, wide, paired):  # type: ignore[no-untyped-def]
    """The vectors (N, WIDTH) at `rows` (N,), each pair of coordinates multiplied by the complex number at `angles`."""
    x = tl.load(rows[:, None] + column[None, :], mask=valid[:, None] & wide[None, :], other=0.0)
    angle, inside = angles[:, None] + pair[None, :], valid[:, None] & paired[None, :]
    cos, sin = tl.load(angle, mask=inside, other=0.0), tl.load(angle + 1, mask=inside, other=0.0)
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2)))
    return tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_to(q, k, v, seen, scale, largest, share, total):  # type: ignore[no-untyped-def]
    """The attention of queries (N, w) to some more keys and values: largest score, sum of shares, weighted sum."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))
    old, shares = tl.exp(largest - new_largest), tl.exp(score - new_largest[:, None])
    added = tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return new_largest, share * old + tl.sum(shares, 1), total * old[:, None] + added


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _combine_parts(parts, sums, first, num_parts, width, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax-weighted combination of consecutive parts. Loads bypass L1 (.cg): other programs wrote the data."""
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    filled = part < num_parts
    largest = tl.load(sums + 2 * (first + part), mask=filled, other=-float("inf"), cache_modifier=".cg")
    weight = tl.exp(largest - tl.max(largest, 0))
    share = tl.load(sums + 2 * (first + part) + 1, mask=filled, other=0.0, cache_modifier=".cg")
    inside = filled[:, None] & (column < width)[None, :]
    partials = tl.load(
        parts + (first + part)[:, None] * width + column[None, :], mask=inside, other=0.0, cache_modifier=".cg"
    )
    return tl.sum(weight[:, None] * partials, 0) / tl.sum(weight * share, 0)


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
    epsilon,
    WIDTH: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADDING: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One program per PER_PROGRAM outputs; it loads their rows of the matrix before it waits for its predecessors.

    With NORMED, x is the residual stream h in float32; else it has the dtype of the matrix products. With SWIGLU, the
    outputs are gated: the matrix has two rows for each, that of the gate `num_sums` rows above the other.
    """
    number, column = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM), tl.arange(0, BLOCK)
    valid, inside = number < num_sums, column < WIDTH
    offset = number[:, None] * WIDTH + column[None, :]
    w = tl.load(weight + offset, mask=valid[:, None] & inside[None, :], other=0.0)
    if SWIGLU:
        w2 = tl.load(weight + num_sums * WIDTH + offset, mask=valid[:, None] & inside[None, :], other=0.0)
    if NORMED:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0)
        shift = tl.load(norm_shift + column, mask=inside, other=0.0)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        if CENTRED:
            v = tl.where(inside, v - tl.sum(v, 0) / WIDTH, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / WIDTH + epsilon) * scale + shift
        v = v.to(weight.dtype.element_ty).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if BIASED:
        total += tl.load(bias + number, mask=valid, other=0.0).to(tl.float32)
    if GELU:  # x (1 + tanh u) / 2 = x / (1 + e^-2u)
        total = total * tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    if SWIGLU:
        total = total * tl.sigmoid(total) * tl.sum(w2.to(tl.float32) * v[None, :], 1)
    if ADDING:
        gated = tl.load(gate + number, mask=valid, other=0.0)
        total = tl.load(sums + number, mask=valid, other=0.0) + gated * total
    tl.store(sums + number, total.to(sums.dtype.element_ty), mask=valid)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_kernel(product, gated, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row of `product` (N, 2 width) and BLOCK columns: gated = silu(first half) * second half."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(product + 2 * row * width + column, mask=inside, other=0.0).to(tl.float32)
    inner = tl.load(product + (2 * row + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated + row * width + column, (gate * tl.sigmoid(gate) * inner).to(gated.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def partial_softmax_kernel(  # type: ignore[no-untyped-def]
    logits, bias, sums, stride, num_symbols, mask_id, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row and BLOCK symbols: the largest logit, and the sum of e^(logit - largest)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logit = _logits_at(logits + row * stride, bias, part, num_symbols, mask_id, BIASED, BLOCK)
    largest = tl.maximum(tl.max(logit, 0), -1e30)  # finite: -inf - -inf is NaN
    out = sums + 2 * (row * tl.num_programs(1) + part)
    tl.store(out, largest)
    tl.store(out + 1, tl.sum(tl.exp(logit - largest), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def log_beliefs_kernel(  # type: ignore[no-untyped-def]
    logits,
    bias,
    sums,
    log_beliefs,
    stride,
    num_symbols,
    mask_id,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The same programs: logit - log of the sum over all parts of e^logit."""
    row, part, other = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PARTS)
    num_parts = tl.num_programs(1)
    at, exists = sums + 2 * (row * num_parts + other), other < num_parts
    largest = tl.load(at, mask=exists, other=-1e30)
    share = tl.load(at + 1, mask=exists, other=0.0)
    top = tl.max(largest, 0)
    log_norm = top + tl.log(tl.sum(share * tl.exp(largest - top), 0))
    logit = _logits_at(logits + row * stride, bias, part, num_symbols, mask_id, BIASED, BLOCK)
    symbol = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(log_beliefs + row * num_symbols + symbol, logit - log_norm, mask=symbol < num_symbols)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _logits_at(logits, bias, part, num_symbols, mask_id, BIASED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of a row, -inf at the mask and past the end."""
    symbol = part * BLOCK + tl.arange(0, BLOCK)
    inside = (symbol < num_symbols) & (symbol != mask_id)
    logit = tl.load(logits + symbol, mask=inside, other=-float("inf"))
    if BIASED:
        logit += tl.load(bias + symbol, mask=inside, other=0.0)
    return logit
