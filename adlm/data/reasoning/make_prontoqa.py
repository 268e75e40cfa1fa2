"""ProntoQA-like problems of any number: a chain of concepts, a branch at every link, and two decoys. Knows no files.

Problem i depends only on (seed, i): a longer set begins with the shorter one, and parts can be made in parallel.
All 1,000 real problems have one skeleton; what varies are the words, the signs, the wordings and the order.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from adlm.data.reasoning import prontoqa
from adlm.data.reasoning.problem import Graph, Problem
from adlm.data.reasoning.prontoqa import Fact
from adlm.data.reasoning.series import Forbidden, series
from adlm.data.reasoning.vocabulary import PRONTOQA_CONCEPTS, PRONTOQA_NAMES, PROPERTY_FAMILIES
from adlm.errors import UserError


@dataclass(frozen=True)
class Skeleton:
    """How many links the proof has, and how often a property is a negated one; the defaults are the real files'."""

    hops: int = 5
    """Rules in the proof: hops - 1 between concepts, then one that gives the property."""
    chain_negated: float = 0.26
    """Chance of a `not` in the properties of the chain's concepts but the last."""
    branch_negated: float = 0.31
    """The same beside the chain."""
    last_negated: float = 0.45
    """The same for the property that is asked for; the decoy says the opposite."""

    def __post_init__(self) -> None:
        # 2 * hops + 4 concepts and 2 * hops + 1 families of properties in one problem
        most = min((len(PRONTOQA_CONCEPTS) - 4) // 2, (len(PROPERTY_FAMILIES) - 1) // 2)
        if not 1 <= self.hops <= most:
            raise UserError(f"hops {self.hops} is outside 1 to {most}, as many as there are words for")
        for chance in (self.chain_negated, self.branch_negated, self.last_negated):
            if not 0 <= chance <= 1:
                raise UserError(f"a chance of `not` of {chance} is outside 0 to 1; give chain, branch and last_negated")


REAL = Skeleton()


def generate_prontoqa(
    num: int,
    seed: int,
    *,
    start: int = 0,
    skeleton: Skeleton = REAL,
    forbidden: Forbidden | None = None,
) -> Iterator[Problem]:
    """Problems start, start + 1, ..., start + num - 1 of the seed's endless list.

    `forbidden_by(test_files, prontoqa.content)` keeps them apart from test sets, whatever the order and the wording.
    Not `structure` here: one skeleton leaves so few that most draws have that of some test problem.
    """
    return series("prontoqa", lambda rng: _problem(rng, skeleton), num, seed, start, forbidden)


def _problem(rng: random.Random, skeleton: Skeleton) -> Problem:
    """A chain c1 ... ch, a branch beside each link, two beyond the last, and two decoys.

    One decoy is what the name also is, and leads elsewhere; the other is mentioned once, with the asked property
    reversed. Every concept has a property, but one of the two beyond the chain and where the first decoy leads.
    """
    hops = skeleton.hops
    name = rng.choice(PRONTOQA_NAMES)
    words = rng.sample(PRONTOQA_CONCEPTS, 2 * hops + 4)
    chain, branches = words[:hops], words[hops : 2 * hops]
    beyond, decoy, elsewhere, contrary = words[2 * hops :]
    asked, *properties = (rng.choice(family) for family in rng.sample(PROPERTY_FAMILIES, 2 * hops + 1))

    links = [Fact(x, y, True) for x, y in pairwise(chain)]
    asides = [Fact(x, y, True) for x, y in zip(chain, branches, strict=True)]
    others = [Fact(chain[-1], beyond, True), Fact(decoy, elsewhere, True)]
    bearers = [*chain[:-1], *branches, decoy]
    chances = [skeleton.chain_negated] * (hops - 1) + [skeleton.branch_negated] * (hops + 1)
    given = [
        Fact(x, word, False, rng.random() < chance)
        for x, word, chance in zip(bearers, properties, chances, strict=True)
    ]
    last = Fact(chain[-1], asked, False, rng.random() < skeleton.last_negated)
    rules = [*links, *asides, *others, *given, last, Fact(contrary, asked, False, not last.negated)]
    rng.shuffle(rules)
    told = {rule: prontoqa.sentence(rule, rng.choice(("Each", "Every", "Many", "Many"))) for rule in rules}

    states = [Fact(name, concept, True) for concept in chain]
    stated = [prontoqa.sentence(states[0]), prontoqa.sentence(Fact(name, decoy, True))]
    rng.shuffle(stated)
    conclusion = Fact(name, asked, False, last.negated)
    claim = Fact(name, asked, False, rng.random() < 0.5)
    proof = zip(states, [*links, last], strict=True)
    return Problem(
        question=" ".join([*told.values(), *stated, prontoqa.ASKED + prontoqa.sentence(claim)]),
        steps=(*(f"{prontoqa.sentence(state)} {told[rule]}" for state, rule in proof), prontoqa.sentence(conclusion)),
        answer=str(claim == conclusion),
        graph=_graph(name, chain, rules),
    )


def _graph(name: str, chain: list[str], rules: list[Fact]) -> Graph:
    """The rules between concepts, numbered as the real files do: the name, the chain, the rest by alphabet.

    neg_target is the first of the rest, there too, and means nothing. The real lists lack the concepts that occur in
    one plural sentence only, about one a problem; ours lack none.
    """
    edges = [(rule.subject, rule.predicate) for rule in rules if rule.kind]
    concepts = {rule.subject for rule in rules} | {concept for _, concept in edges}
    symbols = (name, *chain, *sorted(concepts - set(chain)))
    place = {symbol: index for index, symbol in enumerate(symbols)}
    return Graph(
        symbols=symbols,
        edges=tuple((place[x], place[y]) for x, y in edges),
        root=0,
        target=len(chain),
        neg_target=len(chain) + 1,
        chain_concepts=tuple(chain),
    )
