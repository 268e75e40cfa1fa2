"""The Triton kernels of `together.py`: beliefs of holes conditioned on an automaton, and joint draws from them.

What is added up backward are pairs (m, k), the number m 2^k with m in double precision: nothing is lost to underflow,
and logarithms took three times as long. In the code m is a value or a mass, and k an exponent or a power. Forward, what
is added up are the probabilities of states, which sum to 1.
Sums have a fixed order that does not depend on how many holes there are, so neither do their results.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

NOTHING = tl.constexpr(-(2**28))
"""The k of 0."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def segments_kernel(  # type: ignore[no-untyped-def]
    log_beliefs, columns, values, exponents, num_symbols, num_segments, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program per row of beliefs and ROWS segments: the sum of each segment, a pair.

    A segment is at most WIDTH columns of one class; -1 fills it up.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.load(columns + segment[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    belief = tl.load(log_beliefs + row * num_symbols + column, mask=column >= 0, other=float("-inf"))
    binary = belief.to(tl.float64) * 1.4426950408889634
    power = tl.floor(tl.maximum(tl.max(binary, 1), -1e8))
    value = tl.sum(tl.exp2((binary - power[:, None]).to(tl.float32)).to(tl.float64), 1)
    tl.store(values + row * num_segments + segment, value)
    tl.store(exponents + row * num_segments + segment, tl.where(value == 0, NOTHING, power.to(tl.int32)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def class_beliefs_kernel(  # type: ignore[no-untyped-def]
    of_segments,
    powers_of_segments,
    slots,
    ids,
    classes,
    class_of_segment,
    values,
    exponents,
    num_segments,
    num_places,
    num_classes,
    end_class,
    end_id,
    least,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program per place of a hole: the summed beliefs in each class, a pair each.

    `slots` has the row of the beliefs of masked places, -1 of visible ones: these are certain of their class. Segments
    are sorted by class; the class of those that only fill the last program is -1.
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
        for start in range(0, num_segments, BLOCK):
            index = start + tl.arange(0, BLOCK)
            own = tl.load(class_of_segment + index, mask=index < num_segments, other=-1)
            after = tl.load(class_of_segment + index + 1, mask=index + 1 < num_segments, other=-1)
            value = tl.load(of_segments + slot * num_segments + index, mask=own >= 0, other=0.0)
            power = tl.load(powers_of_segments + slot * num_segments + index, mask=own >= 0, other=NOTHING)
            value, power, _ = tl.associative_scan((value, power, own), 0, _add_pairs)
            continued = own == class_before
            carried, power_of_carried = tl.where(continued, sum_before, 0.0), tl.where(continued, power_before, NOTHING)
            value, power = _plus(value, power, carried, power_of_carried)
            is_last = index == start + BLOCK - 1
            sum_before, power_before = tl.sum(tl.where(is_last, value, 0.0), 0), tl.sum(tl.where(is_last, power, 0), 0)
            class_before = tl.sum(tl.where(is_last, own, 0), 0)
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
    uniform_of,
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

    Transitions are sorted by their source; `by_target` and `by_class` are other orders of them, and `ends_of_*` have
    the last one of each state, -1 if it has none. `uniform_of` is -1 where nothing is drawn. What is `left` of uniform
    numbers are uniform numbers.
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
        number_of_uniform = tl.load(uniform_of + hole * num_places + place)
        if number_of_uniform >= 0:
            uniform = tl.load(uniforms + number_of_uniform)
            ordered, total = tl.gather(chance, class_order, 0), tl.sum(chance, 0)
            drawn = tl.sum(tl.where(edge == _first_above(ordered, uniform * total, edge), sorted_class, 0), 0)
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
    of_segments,
    powers_of_segments,
    slots,
    columns,
    starts,
    places,
    chosen,
    left,
    shares,
    tokens,
    num_symbols,
    num_segments,
    end_class,
    end_id,
    WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One program per place to draw: a token of the class that was chosen, and the probability of both.

    First its segment, of at most SEGMENTS of the class, then the column in it.
    """
    place = tl.load(places + tl.program_id(0))
    number, slot = tl.load(chosen + place), tl.load(slots + place)
    is_after_end = number == end_class + 1
    first, last = tl.load(starts + number), tl.load(starts + number + 1)
    index = first + tl.arange(0, SEGMENTS)
    value = tl.load(of_segments + slot * num_segments + index, mask=index < last, other=0.0)
    power = tl.load(powers_of_segments + slot * num_segments + index, mask=index < last, other=NOTHING)
    weight = value * _two_to(power - tl.max(power, 0))
    goal = tl.load(left + place) * tl.sum(weight, 0)
    segment = _first_above(weight, goal, index)
    rest = goal - tl.sum(tl.where(index < segment, weight, 0.0), 0)
    own = tl.sum(tl.where(index == segment, weight, 0.0), 0)
    inside = tl.arange(0, WIDTH)
    here = segment * WIDTH + inside
    column = tl.load(columns + here, mask=here < last * WIDTH, other=-1)  # what follows an end has no segment
    belief = tl.load(log_beliefs + slot * num_symbols + column, mask=column >= 0, other=float("-inf"))
    in_segment = tl.exp(belief - tl.max(belief, 0)).to(tl.float64)
    total = tl.sum(in_segment, 0)
    found = _first_above(in_segment, rest / own * total, inside)
    share = own / tl.sum(weight, 0) * tl.sum(tl.where(inside == found, in_segment, 0.0), 0) / total
    token = tl.sum(tl.where(inside == found, column, 0), 0).to(tl.int64)
    tl.store(tokens + place, tl.where(is_after_end, end_id, token))
    tl.store(shares + place, tl.load(shares + place) * tl.where(is_after_end, 1.0, share))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _first_above(weight, goal, index):  # type: ignore[no-untyped-def]
    """The first index of positive weight whose cumulative weight exceeds the goal; if none does, the last of them."""
    ends = tl.where(weight > 0, tl.cumsum(weight, 0), -1.0)
    above = tl.min(tl.where((weight > 0) & (ends > goal), index, 2147483647), 0)
    return tl.minimum(above, tl.min(tl.where(ends == tl.max(ends, 0), index, 2147483647), 0))


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
