"""The Triton kernels of `together.py`: beliefs of holes conditioned on an automaton, and joint draws from them.

Everything is in float64. Sums have a fixed order that does not depend on how many holes there are, so neither do their
results. What is added up backward is in logarithms: nothing is lost to underflow. Forward, what is added up is the
probabilities of states, which have the sum 1.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def class_beliefs_kernel(  # type: ignore[no-untyped-def]
    log_beliefs,
    slots,
    ids,
    classes,
    columns,
    starts,
    found,
    num_symbols,
    num_places,
    num_classes,
    end_class,
    end_id,
    least,
    BLOCK: tl.constexpr,
):
    """One program per place of a hole and class: the log of the summed beliefs in the class.

    `slots` has the row of `log_beliefs` of masked places, -1 of visible ones: these are certain of their class.
    """
    place, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, token = tl.load(slots + place), tl.load(ids + place)
    is_after_end = number == end_class + 1
    total = tl.full((), float("-inf"), tl.float64)
    if slot < 0:
        is_own = (tl.load(classes + token) == number) | ((token == end_id) & is_after_end)
        total = tl.where(is_own, 0.0, total)
    else:
        first, last = tl.load(starts + number), tl.load(starts + number + 1)
        peak, mass = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float64)
        for start in range(first, last, BLOCK):
            index = start + tl.arange(0, BLOCK)
            column = tl.load(columns + index, mask=index < last, other=0)
            belief = tl.load(log_beliefs + slot * num_symbols + column, mask=index < last, other=float("-inf"))
            highest = tl.maximum(peak, tl.max(belief, 0))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            mass = mass * tl.exp((peak - shift).to(tl.float64)) + tl.sum(tl.exp(belief - shift).to(tl.float64), 0)
            peak = highest
        total = tl.where(peak == float("-inf"), total, peak.to(tl.float64) + tl.log(tl.where(mass > 0, mass, 1.0)))
        total = tl.where(is_after_end, 0.0, total)
    total = tl.where((number == end_class) & (place % num_places < least), float("-inf"), total)
    tl.store(found + place * num_classes + number, total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def classes_kernel(  # type: ignore[no-untyped-def]
    beliefs,
    sources,
    targets,
    numbers,
    ends_of_sources,
    by_target,
    ends_of_targets,
    by_class,
    last_masses,
    masses,
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
    """One program per hole: the class of each place to draw, those of all places to draw from their joint one.

    Transitions are sorted by their source; `by_target` and `by_class` are other orders of them, and `ends_of_*` have the
    last one of each state, -1 if it has none. `uniforms` are -1 where nothing is drawn. `left` is a uniform number too.
    """
    hole = tl.program_id(0).to(tl.int64)
    beliefs += hole * num_places * num_classes
    masses += hole * (num_places + 1) * STATES
    edge, state = tl.arange(0, EDGES), tl.arange(0, STATES)
    source, target, number = tl.load(sources + edge), tl.load(targets + edge), tl.load(numbers + edge)
    is_edge, number = number >= 0, tl.maximum(number, 0)
    end_of_source = tl.load(ends_of_sources + state)
    mass = tl.load(last_masses + state)
    tl.store(masses + num_places * STATES + state, mass)
    for back in range(num_places):
        place = num_places - 1 - back
        belief = tl.load(beliefs + place * num_classes + number, mask=is_edge, other=float("-inf"))
        added, _ = tl.associative_scan((belief + tl.gather(mass, target, 0), source), 0, _add_logs)
        mass = tl.where(end_of_source >= 0, tl.gather(added, tl.maximum(end_of_source, 0), 0), float("-inf"))
        tl.store(masses + place * STATES + state, mass)
    tl.debug_barrier()  # all of them are written before they are read again
    target_order, class_order = tl.load(by_target + edge), tl.load(by_class + edge)
    sorted_target, sorted_class = tl.gather(target, target_order, 0), tl.gather(number, class_order, 0)
    end_of_target = tl.load(ends_of_targets + state)
    chance_of = tl.where(state == 0, 1.0, 0.0).to(tl.float64)
    for place in range(tl.load(last_drawn + hole) + 1):
        before, after = tl.load(masses + place * STATES + state), tl.load(masses + (place + 1) * STATES + state)
        before = tl.where(before == float("-inf"), 0.0, before)  # nothing follows: the chance is 0
        belief = tl.load(beliefs + place * num_classes + number, mask=is_edge, other=float("-inf"))
        log_chance = belief + tl.gather(after, target, 0) - tl.gather(before, source, 0)
        chance = tl.gather(chance_of, source, 0) * tl.exp(log_chance)
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
def _add_logs(value, group, next_value, next_group):  # type: ignore[no-untyped-def]
    """Within a group, the log of the sum of exp."""
    high, low = tl.maximum(value, next_value), tl.minimum(value, next_value)
    both = high + tl.log(1.0 + tl.exp(tl.where(low == float("-inf"), low, low - high)))
    return tl.where(group == next_group, both, next_value), next_group


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(value, group, next_value, next_group):  # type: ignore[no-untyped-def]
    return tl.where(group == next_group, value + next_value, next_value), next_group


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
        index = start + tl.arange(0, BLOCK)
        column = tl.load(columns + index, mask=index < last, other=0)
        belief = tl.load(row + column, mask=index < last, other=float("-inf"))
        highest = tl.maximum(peak, tl.max(belief, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp((peak - shift).to(tl.float64)) + tl.sum(tl.exp(belief - shift).to(tl.float64), 0)
        peak = highest
    goal, before = tl.load(left + place) * mass, tl.zeros((), tl.float64)
    found, weight_of_found = tl.full((), 0, tl.int64), tl.zeros((), tl.float64)
    is_open = tl.full(
        (), 1, tl.int1
    )  # the cumulative weight is not above the goal yet: the last symbol with a weight is the best so far
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        column = tl.load(columns + index, mask=index < last, other=0)
        belief = tl.load(row + column, mask=index < last, other=float("-inf"))
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
