"""The Triton kernels of draws: `categorical` in rng.py and `nucleus` in shaping.py. One row is one distribution.

Sums have a fixed order that does not depend on the number of a row, so neither does its result.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def group_sums_kernel(weights, sums, num_symbols, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row and GROUP symbols: their sum, in float64."""
    row, symbol = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    weight = tl.load(weights + row * num_symbols + symbol, mask=symbol < num_symbols, other=0.0)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(weight.to(tl.float64), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def choose_symbol_kernel(  # type: ignore[no-untyped-def]
    weights, sums, uniforms, chosen, num_symbols, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """One program per row: the group in which the cumulative weight exceeds uniform * total, then the symbol in it."""
    row, number, place = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS), tl.arange(0, GROUP)
    of_group = tl.load(sums + row * num_groups + number, mask=number < num_groups, other=0.0)
    target = tl.load(uniforms + row) * tl.sum(of_group, 0)
    group = _first_above(of_group, target, number, GROUPS)
    before = tl.sum(tl.where(number < group, of_group, 0.0), 0)
    symbol = group * GROUP + place
    weight = tl.load(weights + row * num_symbols + symbol, mask=symbol < num_symbols, other=0.0).to(tl.float64)
    found = group * GROUP + _first_above(weight, target - before, place, GROUP)
    tl.store(chosen + row, found.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _first_above(weight, target, index, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index of positive weight whose cumulative weight exceeds the target; if none does, the last of them."""
    cumulative = tl.where(weight > 0, tl.cumsum(weight, 0), -1.0)
    first = tl.min(tl.where((weight > 0) & (cumulative > target), index, SIZE), 0)
    last = tl.min(tl.where(cumulative == tl.max(cumulative, 0), index, SIZE), 0)
    return tl.minimum(first, last)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def nucleus_kernel(  # type: ignore[no-untyped-def]
    beliefs, kept, num_symbols, p, CROSSING: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: the likeliest symbols with a total of about p, normalised.

    Beliefs are at least 0, so their bits have the same order. A binary search finds the smallest bits `least` such that
    the symbols above them have less than p. These are kept, and the first of the symbols equal to `least`, up to p.
    A row fits into the cache of a multiprocessor, so reading it 30 times is faster than sorting it.
    """
    row = tl.program_id(0).to(tl.int64) * num_symbols
    highest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_symbols, BLOCK):
        highest = tl.maximum(highest, _beliefs_at(beliefs + row, start, num_symbols, BLOCK))
    least, high = 0, tl.max(highest.to(tl.int32, bitcast=True), 0)  # above `high` there is nothing
    while least < high:
        middle = least + (high - least) // 2
        is_enough = _mass_above(beliefs + row, middle, num_symbols, BLOCK) >= p
        least, high = tl.where(is_enough, middle + 1, least), tl.where(is_enough, high, middle)
    mass, belief_of_least = _mass_above(beliefs + row, least, num_symbols, BLOCK), least.to(tl.float32, bitcast=True)  # type: ignore[attr-defined]
    total, num_equal = tl.zeros((BLOCK,), tl.float32), 0
    for start in range(0, num_symbols, BLOCK):
        belief = _beliefs_at(beliefs + row, start, num_symbols, BLOCK)
        bits = belief.to(tl.int32, bitcast=True)
        is_equal = (bits == least).to(tl.int32)
        before = mass + (num_equal + tl.cumsum(is_equal, 0) - 1).to(tl.float32) * belief_of_least
        # the likeliest symbol is always kept
        fits = before < p if CROSSING else (before + belief_of_least <= p) | (before == 0)
        part = tl.where((bits > least) | (is_equal > 0) & fits, belief, 0.0)
        num_equal, total = num_equal + tl.sum(is_equal, 0), total + part
        symbol = start + tl.arange(0, BLOCK)
        tl.store(kept + row + symbol, part, mask=symbol < num_symbols)
    tl.debug_barrier()  # all of the row is written before it is read again
    all_kept = tl.sum(total, 0)
    for start in range(0, num_symbols, BLOCK):
        symbol = start + tl.arange(0, BLOCK)
        part = _beliefs_at(kept + row, start, num_symbols, BLOCK)
        tl.store(kept + row + symbol, part / all_kept, mask=symbol < num_symbols)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _beliefs_at(beliefs, start, num_symbols, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    symbol = start + tl.arange(0, BLOCK)
    return tl.load(beliefs + symbol, mask=symbol < num_symbols, other=0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mass_above(beliefs, bits, num_symbols, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the beliefs whose bits are above these."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_symbols, BLOCK):
        belief = _beliefs_at(beliefs, start, num_symbols, BLOCK)
        mass += tl.where(belief.to(tl.int32, bitcast=True) > bits, belief, 0.0)
    return tl.sum(mass, 0)
