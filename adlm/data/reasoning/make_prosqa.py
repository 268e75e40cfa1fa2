"""ProsQA-like problems of any number: random graphs, told in sentences. Knows no files.

Problem i depends only on (seed, i): a longer set begins with the shorter one, and parts can be made in parallel.
The graph follows the published description [Hao et al., 2024, appendix], its constants fitted to the 800 real graphs.
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
"""Who a node can be proved of: the first entity, the second, both; 0 is neither."""


@dataclass(frozen=True)
class Shape:
    """What graphs are drawn; the defaults are the real files'."""

    num_nodes: int = 28
    """Nodes drawn; those without any edge are left out, about five of them."""
    mean_parents: float = 1.5
    """Each node draws a Poisson number of parents among the nodes before it."""
    first_share: float = 0.35
    second_share: float = 0.45
    """Chance that all parents are of the first entity alone, or of the second alone; else they are any nodes."""
    depth_weight: float = 1.5
    """A parent d facts away from its only entity is drawn with weight 1 + depth_weight * d: it makes chains long."""
    min_hops: int = 3
    max_hops: int = 6

    def __post_init__(self) -> None:
        most = 2 + len(PROSQA_CONCEPTS)
        if not 4 <= self.num_nodes <= most:
            raise UserError(f"num_nodes {self.num_nodes} is outside 4 to {most}, as many as there are concepts for")
        if not 1 <= self.min_hops <= self.max_hops:
            raise UserError(f"min_hops {self.min_hops} and max_hops {self.max_hops} are not 1 <= min_hops <= max_hops")
        if not 0 < self.mean_parents <= 10 or self.depth_weight < 0:
            raise UserError(
                f"mean_parents {self.mean_parents} is not in (0, 10], or depth_weight {self.depth_weight} is below 0"
            )
        if self.first_share < 0 or self.second_share < 0 or self.first_share + self.second_share > 1:
            raise UserError(
                f"first_share {self.first_share} and second_share {self.second_share} are no chances of two choices"
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
    """Problems start, start + 1, ..., start + num - 1 of the seed's endless list.

    `forbidden_by(test_files, prosqa.structure)` keeps them apart from test sets, whatever the order and the names.
    """
    return series("prosqa", lambda rng: _problem(rng, shape), num, seed, start, forbidden)


def _problem(rng: random.Random, shape: Shape) -> Problem:
    for _ in range(MOST_DRAWS):
        drawn = _draw(rng, shape)
        if drawn is not None:
            return _tell(rng, *drawn)
    raise UserError(
        f"no graph of {shape.num_nodes} nodes with {shape.min_hops} to {shape.max_hops} hops in {MOST_DRAWS} draws; "
        "ask for fewer hops"
    )


def _draw(rng: random.Random, shape: Shape) -> tuple[list[list[int]], list[int], int] | None:
    """Each node's parents, the nodes of the proof from entity to target, and the wrong option; None where none fits.

    The target is one of the deepest leaves that belong to one entity alone; the wrong option any leaf of the other's.
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
    """Each node's parents, owner, and distance from the owner (0 where it is not one); 0 and 1 are the entities."""
    parents: list[list[int]] = [[], []]
    owner, depth, weight = [FIRST, SECOND], [0, 0], [1.0, 1.0]
    num_parents = _poisson(shape.mean_parents)
    for node in range(2, shape.num_nodes):
        wanted, share = bisect.bisect_left(num_parents, rng.random()), rng.random()
        among = FIRST if share < shape.first_share else SECOND if share < shape.first_share + shape.second_share else 0
        candidates = [v for v in range(node) if not among or owner[v] == among]
        ins = _choose(rng, candidates, [weight[v] for v in candidates], wanted)
        who = 0
        for v in ins:
            who |= owner[v]
        alone = who in (FIRST, SECOND)
        parents.append(ins)
        owner.append(who)
        depth.append(1 + min(depth[v] for v in ins if owner[v] == who) if alone else 0)
        weight.append(1 + shape.depth_weight * depth[node])
    return parents, owner, depth


def _choose(rng: random.Random, candidates: list[int], weights: list[float], num: int) -> list[int]:
    """Different candidates, one after the other, each by its weight among those left."""
    chosen = []
    for _ in range(min(num, len(candidates))):
        cumulative = list(itertools.accumulate(weights))
        place = bisect.bisect_right(cumulative, rng.random() * cumulative[-1], hi=len(candidates) - 1)
        chosen.append(candidates.pop(place))
        weights.pop(place)
    return chosen


def _poisson(mean: float) -> list[float]:
    """P(X <= k) for k = 0, 1, ..., as far as anything is left in double precision."""
    chances = [math.exp(-mean)]
    while len(chances) < 60:
        chances.append(chances[-1] * mean / len(chances))
    return list(itertools.accumulate(chances))


def _tell(rng: random.Random, parents: list[list[int]], path: list[int], wrong: int) -> Problem:
    """The graph in words: what has no parent is someone's name, the rest are concepts; facts in any order."""
    inner = {node for ins in parents for node in ins}
    kept = [v for v, ins in enumerate(parents) if ins or v in inner]
    names = iter(rng.sample(PROSQA_NAMES, sum(not parents[v] for v in kept)))
    concepts = iter(rng.sample(PROSQA_CONCEPTS, sum(bool(parents[v]) for v in kept)))
    symbol = {v: next(concepts if parents[v] else names) for v in kept}
    place = {v: index for index, v in enumerate(kept)}
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
            edges=tuple((place[u], place[v]) for v in kept for u in parents[v]),
            root=place[path[0]],
            target=place[path[-1]],
            neg_target=place[wrong],
        ),
    )
