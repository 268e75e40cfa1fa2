"""The Triton kernels of `together.py`: beliefs of holes conditioned on an automaton, and joint draws from them.

What is added up backward are pairs (m, k), the number m 2^k with m in double precision: nothing is lost to underflow,
and logarithms would take twice the time. Forward, what is added up are the probabilities of states, which sum to 1.
Sums have a fixed order that does not depend on how many holes there are, so neither do their results.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

NOTHING = tl.constexpr(-(2**28))
"""The k of 0."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def class_beliefs_kernel(  # type: ignore[no-untyped-def]
    log_beliefs,
    slots,
    ids,
    classes,
    columns,
    class_of_column,
    values,
    exponents,
    num_symbols,
    num_columns,
    num_places,
    num_classes,
    end_class,
    end_id,
    least,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program per place of a hole: the summed beliefs in each class, a pair each.

    `slots` has the row of `log_beliefs` of masked places, -1 of visible ones: these are certain of their class.
    Columns are sorted by class; the class of what follows them is -1.
    """
    place, number = tl.program_id(0).to(tl.int64), tl.arange(0, CLASSES)
    slot, token = tl.load(slots + place), tl.load(ids + place)
    values += place * num_classes
    exponents += place * num_classes
    is_visible, is_class = slot < 0, number < num_classes
    is_own = (tl.load(classes + token) == number) | ((token == end_id) & (number == end_class + 1))
    is_certain = tl.where(is_visible, is_own, number == end_class + 1)
    tl.store(values + number, tl.where(is_certain, 1.0, 0.0).to(tl.float64), mask=is_class)
    tl.store(exponents + number, tl.where(is_certain, 0, NOTHING), mask=is_class)
    if not is_visible:
        tl.debug_barrier()  # what is stored above is replaced below
        left_out = tl.where(place % num_places < least, end_class, -1)  # it cannot end yet
        sum_before, power_before, class_before = tl.zeros((), tl.float64), tl.full((), NOTHING, tl.int32), -1
        for start in range(0, num_columns, BLOCK):
            index = start + tl.arange(0, BLOCK)
            column = tl.load(columns + index, mask=index < num_columns, other=0)
            own = tl.load(class_of_column + index, mask=index < num_columns, other=-1)
            belief = tl.load(log_beliefs + slot * num_symbols + column, mask=index < num_columns, other=float("-inf"))
            binary = belief.to(tl.float64) * 1.4426950408889634
            whole = tl.floor(tl.maximum(binary, -1e8))
            is_zero = belief == float("-inf")
            value = tl.where(is_zero, 0.0, tl.exp2((binary - whole).to(tl.float32)).to(tl.float64))
            power = tl.where(is_zero, NOTHING, whole.to(tl.int32))
            value, power, _ = tl.associative_scan((value, power, own), 0, _add_pairs)
            continued = own == class_before
            value, power = _plus(value, power, tl.where(continued, sum_before, 0.0), power_before)
            is_last = index == tl.minimum(start + BLOCK, num_columns) - 1
            sum_before, power_before = tl.sum(tl.where(is_last, value, 0.0), 0), tl.sum(tl.where(is_last, power, 0), 0)
            class_before = tl.sum(tl.where(is_last, own, 0), 0)
            after = tl.load(class_of_column + index + 1, mask=index < num_columns, other=-1)
            value, power = _normal(value, power)
            is_end = (own != after) & (own >= 0) & (own != left_out)
            tl.store(values + own, value, mask=is_end)
            tl.store(exponents + own, power, mask=is_end)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def classes_kernel(  # type: ignore[no-untyped-def]
    values,
    exponents,
    sources,
    targets,
    numbers,
    ends_of_sources,
    by_target,
    ends_of_targets,
    by_class,
    may_follow,
    masses,
    powers,
    uniforms,
    last_drawn,
    chosen,
    left,
    shares,
    num_places,
    num_classes,
    EDGES: tl.constexpr,
    STATES: tl.constexpr,
):
    """One program per hole: the class of each place to draw, those of all of them from their joint distribution.

    Transitions are sorted by their source; `by_target` and `by_class` are other orders of them, and `ends_of_*` have the
    last one of each state, -1 if it has none. `uniforms` are -1 where nothing is drawn. `left` is a uniform number too.
    """
    hole = tl.program_id(0).to(tl.int64)
    values += hole * num_places * num_classes
    exponents += hole * num_places * num_classes
    masses += hole * (num_places + 1) * STATES
    powers += hole * (num_places + 1) * STATES
    edge, state = tl.arange(0, EDGES), tl.arange(0, STATES)
    source, target, number = tl.load(sources + edge), tl.load(targets + edge), tl.load(numbers + edge)
    is_edge, number = number >= 0, tl.maximum(number, 0)
    end_of_source = tl.load(ends_of_sources + state)
    mass = tl.where(tl.load(may_follow + state), 1.0, 0.0).to(tl.float64)
    power = tl.where(mass > 0, 0, NOTHING)
    tl.store(masses + num_places * STATES + state, mass)
    tl.store(powers + num_places * STATES + state, power)
    for back in range(num_places):
        place = num_places - 1 - back
        value = tl.load(values + place * num_classes + number, mask=is_edge, other=0.0)
        exponent = tl.load(exponents + place * num_classes + number, mask=is_edge, other=NOTHING)
        value, exponent = value * tl.gather(mass, target, 0), exponent + tl.gather(power, target, 0)
        value, exponent, _ = tl.associative_scan((value, exponent, source), 0, _add_pairs)
        mass = tl.where(end_of_source >= 0, tl.gather(value, tl.maximum(end_of_source, 0), 0), 0.0)
        mass, power = _normal(mass, tl.gather(exponent, tl.maximum(end_of_source, 0), 0))
        tl.store(masses + place * STATES + state, mass)
        tl.store(powers + place * STATES + state, power)
    tl.debug_barrier()  # all of them are written before they are read again
    target_order, class_order = tl.load(by_target + edge), tl.load(by_class + edge)
    sorted_target, sorted_class = tl.gather(target, target_order, 0), tl.gather(number, class_order, 0)
    end_of_target = tl.load(ends_of_targets + state)
    chance_of = tl.where(state == 0, 1.0, 0.0).to(tl.float64)
    for place in range(tl.load(last_drawn + hole) + 1):
        mass, after = tl.load(masses + place * STATES + state), tl.load(masses + (place + 1) * STATES + state)
        power, power_after = tl.load(powers + place * STATES + state), tl.load(powers + (place + 1) * STATES + state)
        value = tl.load(values + place * num_classes + number, mask=is_edge, other=0.0)
        exponent = tl.load(exponents + place * num_classes + number, mask=is_edge, other=NOTHING)
        share_of = tl.where(mass > 0, chance_of / mass, 0.0)  # where nothing follows, the chance is 0
        chance = value * tl.gather(after, target, 0) * tl.gather(share_of, source, 0)
        chance *= _two_to(exponent + tl.gather(power_after, target, 0) - tl.gather(power, source, 0))
        uniform = tl.load(uniforms + hole * num_places + place)
        if uniform >= 0:
            ordered, total = tl.gather(chance, class_order, 0), tl.sum(chance, 0)
            ends = tl.where(ordered > 0, tl.cumsum(ordered, 0), -1.0)
            first = tl.min(tl.where((ordered > 0) & (ends > uniform * total), edge, EDGES), 0)
            first = tl.minimum(first, tl.min(tl.where(ends == tl.max(ends, 0), edge, EDGES), 0))
            drawn = tl.sum(tl.where(edge == first, sorted_class, 0), 0)
            weight = tl.sum(tl.where(number == drawn, chance, 0.0), 0)
            rest = (uniform * total - tl.sum(tl.where(number < drawn, chance, 0.0), 0)) / weight
            chance = tl.where(number == drawn, chance, 0.0) / weight
            where = hole * num_places + place
            tl.store(chosen + where, drawn)
            tl.store(left + where, tl.minimum(tl.maximum(rest, 0.0), 1 - 2.0**-53))
            tl.store(shares + where, weight / total)
        added, _ = tl.associative_scan((tl.gather(chance, target_order, 0), sorted_target), 0, _add)
        chance_of = tl.where(end_of_target >= 0, tl.gather(added, tl.maximum(end_of_target, 0), 0), 0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def tokens_kernel(  # type: ignore[no-untyped-def]
    log_beliefs,
    slots,
    columns,
    starts,
    places,
    chosen,
    left,
    shares,
    tokens,
    num_symbols,
    end_class,
    end_id,
    BLOCK: tl.constexpr,
):
    """One program per place to draw: a token of the class that was chosen, and the probability of both."""
    place = tl.load(places + tl.program_id(0))
    number, row = tl.load(chosen + place), log_beliefs + tl.load(slots + place) * num_symbols
    is_after_end = number == end_class + 1
    first, last = tl.load(starts + number), tl.load(starts + number + 1)
    peak, mass = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float64)
    for start in range(first, last, BLOCK):
        belief, _, _ = _beliefs_at(row, columns, start, last, BLOCK)
        highest = tl.maximum(peak, tl.max(belief, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp((peak - shift).to(tl.float64)) + tl.sum(tl.exp(belief - shift).to(tl.float64), 0)
        peak = highest
    goal, before = tl.load(left + place) * mass, tl.zeros((), tl.float64)
    found, weight_of_found = tl.full((), 0, tl.int64), tl.zeros((), tl.float64)
    is_open = tl.full((), 1, tl.int1)  # no cumulative weight is above the goal yet: the last weight is the best so far
    for start in range(first, last, BLOCK):
        belief, index, column = _beliefs_at(row, columns, start, last, BLOCK)
        weight = tl.exp(belief - peak).to(tl.float64)
        ends = before + tl.cumsum(weight, 0)
        above = tl.min(tl.where((weight > 0) & (ends > goal), index, last), 0)
        best = tl.where(above < last, above, tl.max(tl.where(weight > 0, index, -1), 0))
        own = tl.sum(tl.where(index == best, weight, 0.0), 0)
        takes = is_open & (best >= 0)
        found = tl.where(takes, tl.sum(tl.where(index == best, column, 0), 0).to(tl.int64), found)
        weight_of_found = tl.where(takes, own, weight_of_found)
        is_open = is_open & (above == last)
        before += tl.sum(weight, 0)
    tl.store(tokens + place, tl.where(is_after_end, end_id, found))
    share = tl.where(is_after_end, 1.0, weight_of_found / mass)
    tl.store(shares + place, tl.load(shares + place) * share)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _beliefs_at(row, columns, start, last, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = start + tl.arange(0, BLOCK)
    column = tl.load(columns + index, mask=index < last, other=0)
    return tl.load(row + column, mask=index < last, other=float("-inf")), index, column


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_pairs(value, power, group, next_value, next_power, next_group):  # type: ignore[no-untyped-def]
    """The sum of pairs within a group."""
    together = group == next_group
    total, high = _plus(next_value, next_power, tl.where(together, value, 0.0), tl.where(together, power, NOTHING))
    return total, high, next_group


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(value, group, next_value, next_group):  # type: ignore[no-untyped-def]
    return tl.where(group == next_group, value + next_value, next_value), next_group


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _plus(value, power, other, power_of_other):  # type: ignore[no-untyped-def]
    high = tl.maximum(power, power_of_other)
    return value * _two_to(power - high) + other * _two_to(power_of_other - high), high


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normal(value, power):  # type: ignore[no-untyped-def]
    """The same number with a value in [1, 2), or 0."""
    exponent = ((value.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023
    return value * _two_to(-exponent), tl.where(value == 0, NOTHING, power + exponent)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _two_to(power):  # type: ignore[no-untyped-def]
    """2^power, by its bits; 0 below the range of doubles."""
    return ((tl.minimum(tl.maximum(power, -1023), 1023).to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
