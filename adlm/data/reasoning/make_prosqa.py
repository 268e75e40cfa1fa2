"""Generates ProsQA-like problems: random graphs, written as sentences. Reads no files.

Problem i depends only on (seed, i): a longer set begins with the shorter one, and ranges can be generated in parallel.
The graphs follow the published description [Hao et al., 2024, appendix], with constants fitted to the 800 real graphs.
"""

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from adlm.data.reasoning import prosqa
from adlm.data.reasoning.problem import Graph, Problem
from adlm.data.reasoning.series import MOST_DRAWS, Forbidden, series
from adlm.data.reasoning.vocabulary import PROSQA_CONCEPTS, PROSQA_NAMES
from adlm.errors import UserError

FIRST, SECOND, BOTH = 1, 2, 3
"""The entities from which a node can be reached: the first, the second, both; 0 is neither."""


@dataclass(frozen=True)
class Shape:
    """Parameters of the random graphs; the defaults match the real files."""

    num_nodes: int = 28
    """Number of nodes, including those without edges (about five), which are then dropped."""
    mean_parents: float = 1.5
    """Mean of the Poisson number of parents that each node draws among the nodes before it."""
    first_share: float = 0.35
    second_share: float = 0.45
    """Probability that all parents are reachable from the first (second) entity alone; otherwise they are any nodes."""
    depth_weight: float = 1.5
    """A parent at distance d from its only entity has weight 1 + depth_weight * d, which makes chains longer."""
    min_hops: int = 3
    max_hops: int = 6

    def __post_init__(self) -> None:
        most = 2 + len(PROSQA_CONCEPTS)
        if not 4 <= self.num_nodes <= most:
            raise UserError(f"num_nodes {self.num_nodes} is outside 4 to {most}, the most for which there are concepts")
        if not 1 <= self.min_hops <= self.max_hops:
            raise UserError(f"min_hops {self.min_hops} and max_hops {self.max_hops} are not 1 <= min_hops <= max_hops")
        if not 0 < self.mean_parents <= 10 or self.depth_weight < 0:
            raise UserError(
                f"mean_parents {self.mean_parents} is not in (0, 10], or depth_weight {self.depth_weight} is below 0"
            )
        if self.first_share < 0 or self.second_share < 0 or self.first_share + self.second_share > 1:
            raise UserError(
                f"first_share {self.first_share} and second_share {self.second_share} must be at least 0, and their "
                "sum at most 1"
            )


REAL = Shape()


def generate_prosqa(
    num: int,
    seed: int,
    *,
    start: int = 0,
    shape: Shape = REAL,
    forbidden: Forbidden | None = None,
) -> Iterator[Problem]:
    """Problems start, start + 1, ..., start + num - 1 of the infinite series of the seed.

    `forbidden_forms(test_files, prosqa.structure)` excludes the problems of test sets in any order and renaming.
    """
    return series("prosqa", lambda rng: _problem(rng, shape), num, seed, start, forbidden)


def _problem(rng: random.Random, shape: Shape) -> Problem:
    for _ in range(MOST_DRAWS):
        drawn = _draw(rng, shape)
        if drawn is not None:
            return _to_problem(rng, *drawn)
    raise UserError(
        f"no graph of {shape.num_nodes} nodes with {shape.min_hops} to {shape.max_hops} hops in {MOST_DRAWS} draws; "
        "ask for fewer hops"
    )


def _draw(rng: random.Random, shape: Shape) -> tuple[list[list[int]], list[int], int] | None:
    """The parents of each node, the path from entity to target, and the wrong option; None if the graph is unsuitable.

    The target is one of the deepest leaves reachable from one entity alone; the wrong option is any leaf of the other.
    """
    parents, owner, depth = _graph(rng, shape)
    inner = {node for ins in parents for node in ins}
    leaves = [v for v in range(2, shape.num_nodes) if v not in inner and owner[v] in (FIRST, SECOND)]
    if {owner[v] for v in leaves} != {FIRST, SECOND}:
        return None
    hops = max(depth[v] for v in leaves)
    num_names = sum(not ins and v in inner for v, ins in enumerate(parents))
    if not shape.min_hops <= hops <= shape.max_hops or num_names > len(PROSQA_NAMES):
        return None
    target = rng.choice([v for v in leaves if depth[v] == hops])
    wrong = rng.choice([v for v in leaves if owner[v] != owner[target]])
    path = [target]
    while depth[path[0]]:
        nearer = [u for u in parents[path[0]] if owner[u] == owner[target] and depth[u] == depth[path[0]] - 1]
        path.insert(0, rng.choice(nearer))
    return parents, path, wrong


def _graph(rng: random.Random, shape: Shape) -> tuple[list[list[int]], list[int], list[int]]:
    """Parents, owner, and distance from the owner (0 unless it is unique) of each node; 0 and 1 are the entities."""
    parents: list[list[int]] = [[], []]
    owner, depth, weight = [FIRST, SECOND], [0, 0], [1.0, 1.0]
    num_parents = _poisson(shape.mean_parents)
    for node in range(2, shape.num_nodes):
        wanted, share = bisect.bisect_left(num_parents, rng.random()), rng.random()
        among = FIRST if share < shape.first_share else SECOND if share < shape.first_share + shape.second_share else 0
        candidates = [v for v in range(node) if not among or owner[v] == among]
        ins = _choose(rng, candidates, [weight[v] for v in candidates], wanted)
        owners = 0
        for v in ins:
            owners |= owner[v]
        parents.append(ins)
        owner.append(owners)
        depth.append(1 + min(depth[v] for v in ins if owner[v] == owners) if owners in (FIRST, SECOND) else 0)
        weight.append(1 + shape.depth_weight * depth[node])
    return parents, owner, depth


def _choose(rng: random.Random, candidates: list[int], weights: list[float], num: int) -> list[int]:
    """A weighted sample of candidates without replacement."""
    chosen = []
    for _ in range(min(num, len(candidates))):
        cumulative = list(itertools.accumulate(weights))
        index = bisect.bisect_right(cumulative, rng.random() * cumulative[-1], hi=len(candidates) - 1)
        chosen.append(candidates.pop(index))
        weights.pop(index)
    return chosen


def _poisson(mean: float) -> list[float]:
    """P(X <= k) for k = 0, ..., 59, beyond which it is 1 in double precision."""
    chances = [math.exp(-mean)]
    while len(chances) < 60:
        chances.append(chances[-1] * mean / len(chances))
    return list(itertools.accumulate(chances))


def _to_problem(rng: random.Random, parents: list[list[int]], path: list[int], wrong: int) -> Problem:
    """The problem of a graph: nodes without parents get names, the others concepts; facts are in random order."""
    inner = {node for ins in parents for node in ins}
    kept = [v for v, ins in enumerate(parents) if ins or v in inner]
    names = iter(rng.sample(PROSQA_NAMES, sum(not parents[v] for v in kept)))
    concepts = iter(rng.sample(PROSQA_CONCEPTS, sum(bool(parents[v]) for v in kept)))
    symbol = {v: next(concepts if parents[v] else names) for v in kept}
    index_of = {v: index for index, v in enumerate(kept)}
    facts = [(symbol[u], symbol[v]) for v in kept for u in parents[v]]
    rng.shuffle(facts)
    entity, target = symbol[path[0]], symbol[path[-1]]
    options = [target, symbol[wrong]]
    rng.shuffle(options)
    steps = ((symbol[u], symbol[v]) for u, v in itertools.pairwise(path))
    return Problem(
        question=" ".join([*map(prosqa.sentence, facts), prosqa.choice(entity, options)]),
        steps=tuple(map(prosqa.sentence, steps)),
        answer=prosqa.sentence((entity, target)),
        graph=Graph(
            symbols=tuple(symbol.values()),
            edges=tuple((index_of[u], index_of[v]) for v in kept for u in parents[v]),
            root=index_of[path[0]],
            target=index_of[path[-1]],
            neg_target=index_of[wrong],
        ),
    )
