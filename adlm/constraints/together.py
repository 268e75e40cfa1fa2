"""Tokens of many holes with one automaton, drawn on a GPU in four kernels, while the host goes on.

The plain form is `condition` of each hole and `Conditioned.draw`: to rounding, equal uniform numbers draw equal tokens.
Beliefs are read in single precision and added up in double.

Shapes: H holes, P places looked at, M masked ones of all holes, n of these to draw; V symbols, C classes, S states.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from adlm.constraints.automaton import Ints
from adlm.constraints.holes import HoleAutomaton, all_edges

MAX_EDGES, MAX_STATES = 1024, 128
"""Of the automata that the kernels take, as many as were tried on a GPU: a program holds all transitions."""
WIDTH, ROWS, BLOCK = 64, 16, 1024
"""Columns of a segment, segments that a program adds up, and sums of segments that one reads at once."""
BELIEF_WARPS, CLASS_WARPS = 4, 8
"""Of the programs that add up classes, and of those that choose them."""


def fits(automaton: HoleAutomaton) -> bool:
    """Whether the kernels can take it."""
    num_edges = len(automaton.tokens.source) + (automaton.end_id is not None) * (len(automaton.tokens.final) + 1)
    return num_edges <= MAX_EDGES and automaton.alive.shape[1] <= MAX_STATES


@dataclass(frozen=True, eq=False)
class Tables:
    """An automaton on a device, as the kernels read it."""

    classes: Tensor
    """(V,), of the symbols."""
    columns: Tensor
    """(G, WIDTH), symbols, those of one class after those of another; -1 fills segments up."""
    class_of_segment: Tensor
    """(G,); -1 after the last."""
    starts: Tensor
    """(C + 1,), the segment where each class begins."""
    most_segments: int
    """Of a class, a power of two."""
    edges: tuple[Tensor, ...]
    """Source, target, class of all transitions; the last one of each source; those by target, the last one of each
    target; and those by class. Padded to powers of two, with class -1."""
    may_follow: Tensor
    """(P + 1, S), True at the states after so many places that some continuation completes."""


@lru_cache(maxsize=64)
def tables_of(automaton: HoleAutomaton, num_symbols: int, device: torch.device) -> Tables:
    """The tables of an automaton for beliefs in so many symbols; copied to the device once."""
    source, number, target = all_edges(automaton.tokens, automaton.end_id is not None)
    order = np.argsort(source, kind="stable")
    source, number, target = source[order], number[order], target[order]
    num_states, num_edges = _padded(automaton.alive.shape[1]), _padded(len(source))

    def padded(values: Ints, filled: int) -> Ints:
        return np.concatenate([values, np.full(num_edges - len(values), filled)])

    def last_of(keys: Ints) -> Ints:
        found = np.full(num_states, -1)
        found[keys] = np.arange(len(keys))
        return found

    by_class = np.argsort(padded(number, automaton.num_classes), kind="stable")  # what is filled up comes last
    source, target = padded(source, num_states - 1), padded(target, num_states - 1)
    number, by_target = padded(number, -1), np.argsort(target, kind="stable")
    symbols, runs = automaton.columns
    sizes = np.zeros(automaton.num_classes, dtype=np.int64)
    sizes[runs.index] = np.diff(runs.starts, append=len(symbols))
    num_segments = -(-sizes // WIDTH)
    starts = np.concatenate([[0], num_segments.cumsum()])
    columns = np.full((-(-starts[-1] // ROWS) * ROWS, WIDTH), -1)
    first = (starts[:-1] * WIDTH)[runs.index].repeat(sizes[runs.index])  # of the class of each symbol
    columns.ravel()[first + np.arange(len(symbols)) - runs.starts.repeat(sizes[runs.index])] = symbols.numpy()
    class_of_segment = np.full(len(columns), -1)
    class_of_segment[: starts[-1]] = np.arange(automaton.num_classes).repeat(num_segments)
    may_follow = np.zeros((len(automaton.alive), num_states), dtype=bool)
    may_follow[:, : automaton.alive.shape[1]] = automaton.alive

    def on_device(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device, torch.int32)

    edges = (source, target, number, last_of(source), by_target, last_of(target[by_target]), by_class)
    return Tables(
        on_device(automaton.classes(num_symbols)),
        on_device(columns),
        on_device(class_of_segment),
        on_device(starts),
        _padded(int(num_segments.max())),
        tuple(on_device(each) for each in edges),
        torch.from_numpy(may_follow).to(device),
    )


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def draw_together(
    log_beliefs: Tensor,
    automaton: HoleAutomaton,
    ids: Tensor,
    slots: Tensor,
    uniforms: Tensor,
    uniform_of: Tensor,
    where: Tensor,
    last_drawn: Tensor,
) -> tuple[Tensor, Tensor]:
    """(H, P) each: `ids`, on the device, with tokens at the places where a uniform number is given, and the probability
    of each given those drawn before it in its hole; 1 elsewhere.

    `log_beliefs` (M, V) are those of masked places, `slots` (H, P) the row of each place in them, -1 where a token is
    visible; `uniform_of` (H, P) is which of the uniform numbers draws it, -1 where nothing is drawn, `where` (n,) are
    the flat places to draw, and `last_drawn` (H,) the last of each hole. Masked places have any ids.
    """
    from adlm.constraints.kernels import (  # Triton is imported only where it is used
        class_beliefs_kernel,
        classes_kernel,
        segments_kernel,
        tokens_kernel,
    )

    (num_holes, num_places), (num_masked, num_symbols) = ids.shape, log_beliefs.shape
    tables, num_classes = tables_of(automaton, num_symbols, ids.device), automaton.num_classes
    has_end = automaton.end_id is not None
    end_class, end_id = (automaton.end_class, automaton.end_id) if has_end else (num_classes, -1)
    log_beliefs, tokens = log_beliefs.float().contiguous(), ids.clone()
    uniforms = uniforms if uniforms.data_ptr() % 16 == 0 else uniforms.clone()  # kernels are compiled for one alignment
    num_states, num_edges = tables.may_follow.shape[1], len(tables.edges[0])

    def pairs(*shape: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(shape, dtype=torch.float64, device=ids.device)
        return values, torch.empty(shape, dtype=torch.int32, device=ids.device)

    chance = torch.ones(ids.shape, dtype=torch.float64, device=ids.device)
    if not len(where):
        return tokens, chance
    num_segments = len(tables.columns)
    of_segments, of_classes, masses = (
        pairs(num_masked, num_segments),
        pairs(ids.numel(), num_classes),
        pairs(num_holes, num_places + 1, num_states),
    )
    left, chosen = pairs(ids.numel())
    with torch.cuda.device(ids.device) if ids.is_cuda else nullcontext():
        segments_kernel[(num_masked, num_segments // ROWS)](
            log_beliefs, tables.columns, *of_segments, num_symbols, num_segments, WIDTH, ROWS
        )
        class_beliefs_kernel[(ids.numel(),)](
            *of_segments,
            slots,
            ids,
            tables.classes,
            tables.class_of_segment,
            *of_classes,
            num_segments,
            num_places,
            num_classes,
            end_class,
            end_id,
            automaton.least if has_end else 0,
            min(BLOCK, _padded(num_segments)),
            _padded(num_classes),
            num_warps=BELIEF_WARPS,
        )
        classes_kernel[(num_holes,)](
            *of_classes,
            *tables.edges,
            tables.may_follow[num_places],
            *masses,
            uniforms,
            uniform_of,
            last_drawn,
            chosen,
            left,
            chance,
            num_places,
            num_classes,
            num_edges,
            num_states,
            num_warps=max(1, min(CLASS_WARPS, num_edges // 64)),
        )
        tokens_kernel[(len(where),)](
            log_beliefs,
            *of_segments,
            slots,
            tables.columns,
            tables.starts,
            where,
            chosen,
            left,
            chance,
            tokens,
            num_symbols,
            num_segments,
            end_class,
            end_id,
            WIDTH,
            tables.most_segments,
        )
    return tokens, chance
