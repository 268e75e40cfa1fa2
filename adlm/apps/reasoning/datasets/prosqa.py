"""ProsQA: choose between two statements by following a path through a graph. Read and generated.

A question is a list of facts, `Tom is a terpus.` and `Every terpus is a brimpus.`, and a choice, `Is Tom a lempus or
scrompus?`; exactly one of the two can be reached. The article is always `a`. Generated graphs follow the published
description [Hao et al., 2024, appendix], with constants fitted to the 800 real graphs.
"""

import bisect
import itertools
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adlm.apps.reasoning.problems import MOST_DRAWS, Problem, ProblemSet, canonical_form
from adlm.errors import UserError

# Concepts are invented words, so that problems can be solved only from their sentences; names and stems as published.
NAMED = "Alex Fae Max Polly Rex Sally Sam Stella Wren Bob Carol Davis Eva Gabriel Jack Oliver Tom"
STEMS = "brim dum gor grim im jom lem lor num rom shum ster tum vum wum yum zum bom boom chor fel fom ger gwom hil jel "
STEMS += "ker quim rem ror scrom stor ter tim wor yer yim zhor"
NAMES = tuple(NAMED.split())
CONCEPTS = tuple(f"{stem}pus" for stem in STEMS.split())

FACT = re.compile(r"(?:Every ([a-z]+)|([A-Z][a-z]*)) is a ([a-z]+)\.")
CHOICE = re.compile(r"Is ([A-Z][a-z]*) a ([a-z]+) or ([a-z]+)\?")
SENTENCE = re.compile(r"[^.?]+[.?]")

Fact = tuple[str, str]
"""(x, y): x is a y. A name begins with a capital, a concept does not."""


@dataclass(frozen=True)
class ChoiceQuestion:
    """A parsed question: its facts in order, the entity it asks about, and the two options in order."""

    facts: tuple[Fact, ...]
    entity: str
    options: tuple[str, str]


def sentence(fact: Fact) -> str:
    """The sentence that states a fact."""
    subject, concept = fact
    return f"{subject} is a {concept}." if subject[0].isupper() else f"Every {subject} is a {concept}."


def choice(entity: str, options: Sequence[str]) -> str:
    """The sentence that asks for one of two options."""
    return f"Is {entity} a {options[0]} or {options[1]}?"


def read_fact(text: str) -> Fact:
    """The fact that a sentence states."""
    match = FACT.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a ProsQA fact; expected 'Tom is a terpus.' or 'Every terpus is a brimpus.'")
    return match[1] or match[2], match[3]


def parse(question: str) -> ChoiceQuestion:
    """The facts and the choice of a question; every character must belong to one."""
    sentences = [text.strip() for text in SENTENCE.findall(question)]
    if " ".join(sentences) != question or not sentences:
        raise UserError(f"the question {question[:60]!r} is not sentences with one space between them, as ProsQA's are")
    match = CHOICE.fullmatch(sentences[-1])
    if match is None:
        raise UserError(f"{sentences[-1]!r} is not a ProsQA question; expected 'Is Tom a lempus or scrompus?'")
    return ChoiceQuestion(tuple(map(read_fact, sentences[:-1])), match[1], (match[2], match[3]))


def distances(facts: Iterable[Fact], start: str) -> dict[str, int]:
    """The number of facts in the shortest proof from `start` to everything that can be proved of it."""
    after: dict[str, list[str]] = {}
    for x, y in facts:
        after.setdefault(x, []).append(y)
    found, queue = {start: 0}, [start]
    for x in queue:
        for y in after.get(x, ()):
            if y not in found:
                found[y] = found[x] + 1
                queue.append(y)
    return found


def anchor_labels(problem: Problem) -> tuple[str, ...]:
    """The nodes of the path in order: the name, then the concept of each step (Tom, terpus, brimpus, lempus)."""
    facts = [read_fact(step) for step in problem.steps]
    return tuple(subject for subject, _ in facts[:1]) + tuple(concept for _, concept in facts)


def structure(problem: Problem) -> str:
    """A form of the question that ignores the order of its facts and options, and which names and concepts it uses."""
    puzzle = parse(problem.question)
    colours = {node: "name" if node[0].isupper() else "concept" for fact in puzzle.facts for node in fact}
    colours[puzzle.entity] = "entity"
    colours |= dict.fromkeys(puzzle.options, "option")
    return canonical_form(colours, ((x, y, "is") for x, y in puzzle.facts))


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


REAL = Shape()


def draw(rng: random.Random, shape: Shape = REAL) -> Problem:
    """A random problem; `structure` of test problems, forbidden, excludes them in any order and renaming."""
    for _ in range(MOST_DRAWS):
        drawn = _draw_path(rng, shape)
        if drawn is not None:
            return _to_problem(rng, *drawn)
    raise UserError(
        f"no graph of {shape.num_nodes} nodes with {shape.min_hops} to {shape.max_hops} hops in {MOST_DRAWS} draws; "
        "ask for fewer hops"
    )


def _draw_path(rng: random.Random, shape: Shape) -> tuple[list[list[int]], list[int], int] | None:
    """The parents of each node, the path from entity to target, and the wrong option; None if the graph is unsuitable.

    The target is one of the deepest leaves reachable from one entity alone; the wrong option is any leaf of the other.
    """
    parents, owner, depth = _draw_graph(rng, shape)
    inner = {node for ins in parents for node in ins}
    leaves = [v for v in range(2, shape.num_nodes) if v not in inner and owner[v] in (FIRST, SECOND)]
    if {owner[v] for v in leaves} != {FIRST, SECOND}:
        return None
    hops = max(depth[v] for v in leaves)
    num_names = sum(not ins and v in inner for v, ins in enumerate(parents))
    if not shape.min_hops <= hops <= shape.max_hops or num_names > len(NAMES):
        return None
    target = rng.choice([v for v in leaves if depth[v] == hops])
    wrong = rng.choice([v for v in leaves if owner[v] != owner[target]])
    path = [target]
    while depth[path[0]]:
        nearer = [u for u in parents[path[0]] if owner[u] == owner[target] and depth[u] == depth[path[0]] - 1]
        path.insert(0, rng.choice(nearer))
    return parents, path, wrong


def _draw_graph(rng: random.Random, shape: Shape) -> tuple[list[list[int]], list[int], list[int]]:
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
    names = iter(rng.sample(NAMES, sum(not parents[v] for v in kept)))
    concepts = iter(rng.sample(CONCEPTS, sum(bool(parents[v]) for v in kept)))
    symbol = {v: next(concepts if parents[v] else names) for v in kept}
    facts = [(symbol[u], symbol[v]) for v in kept for u in parents[v]]
    rng.shuffle(facts)
    entity, target = symbol[path[0]], symbol[path[-1]]
    options = [target, symbol[wrong]]
    rng.shuffle(options)
    steps = ((symbol[u], symbol[v]) for u, v in itertools.pairwise(path))
    return Problem(
        question=" ".join([*map(sentence, facts), choice(entity, options)]),
        steps=tuple(map(sentence, steps)),
        answer=sentence((entity, target)),
    )


PROSQA = ProblemSet(
    title="ProsQA: choose between two statements by following a path through a graph "
    "(data.problems generates problems)",
    folders=("prosqa",),
    files={split: (f"prosqa_{split}.json",) for split in ("train", "valid", "test")},
    origin="they are in the folder data of github.com/facebookresearch/coconut; or generate problems: "
    "data.problems=20000",
    labels=anchor_labels,
    removes_steps=True,
    draw=draw,
    form=structure,
)
