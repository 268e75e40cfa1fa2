"""Generates ProntoQA-like problems: a chain of concepts, a branch at every link, and two decoys. Reads no files.

Problem i depends only on (seed, i): a longer set begins with the shorter one, and ranges can be generated in parallel.
All 1,000 real problems have the same skeleton; they differ in words, negations, wordings and order.
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
    """Length of the proof and frequency of negated properties; the defaults match the real files."""

    hops: int = 5
    """Number of rules in the proof: hops - 1 between concepts, then one for the property."""
    chain_negated: float = 0.26
    """Probability of `not` in the properties of the chain's concepts, except the last."""
    branch_negated: float = 0.31
    """Probability of `not` in the properties of the other concepts."""
    last_negated: float = 0.45
    """Probability of `not` in the property of the claim; the decoy has the opposite property."""

    def __post_init__(self) -> None:
        # 2 * hops + 4 concepts and 2 * hops + 1 families of properties in one problem
        most = min((len(PRONTOQA_CONCEPTS) - 4) // 2, (len(PROPERTY_FAMILIES) - 1) // 2)
        if not 1 <= self.hops <= most:
            raise UserError(f"hops {self.hops} is outside 1 to {most}, the most for which there are words")
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
    """Problems start, start + 1, ..., start + num - 1 of the infinite series of the seed.

    `forbidden_forms(test_files, prontoqa.content)` excludes the problems of test sets in any order and wording. Do not
    use `structure` here: with a single skeleton, most draws have the structure of some test problem.
    """
    return series("prontoqa", lambda rng: _problem(rng, skeleton), num, seed, start, forbidden)


def _problem(rng: random.Random, skeleton: Skeleton) -> Problem:
    """A chain of concepts c1 ... ch, a branch at each, one more concept after the last, and two decoys.

    The first decoy is a second concept of the name and leads to another concept; the second has the property of the
    claim negated. Every concept has a property, except the one after the chain and the one the first decoy leads to.
    """
    hops = skeleton.hops
    name = rng.choice(PRONTOQA_NAMES)
    words = rng.sample(PRONTOQA_CONCEPTS, 2 * hops + 4)
    chain, branches = words[:hops], words[hops : 2 * hops]
    beyond, decoy, elsewhere, contrary = words[2 * hops :]
    claimed, *properties = (rng.choice(family) for family in rng.sample(PROPERTY_FAMILIES, 2 * hops + 1))

    links = [Fact(x, y, True) for x, y in pairwise(chain)]
    branch_rules = [Fact(x, y, True) for x, y in zip(chain, branches, strict=True)]
    side_rules = [Fact(chain[-1], beyond, True), Fact(decoy, elsewhere, True)]
    bearers = [*chain[:-1], *branches, decoy]
    chances = [skeleton.chain_negated] * (hops - 1) + [skeleton.branch_negated] * (hops + 1)
    property_rules = [
        Fact(x, word, False, rng.random() < chance)
        for x, word, chance in zip(bearers, properties, chances, strict=True)
    ]
    last = Fact(chain[-1], claimed, False, rng.random() < skeleton.last_negated)
    rules = [
        *links,
        *branch_rules,
        *side_rules,
        *property_rules,
        last,
        Fact(contrary, claimed, False, not last.negated),
    ]
    rng.shuffle(rules)
    sentences = {rule: prontoqa.sentence(rule, rng.choice(("Each", "Every", "Many", "Many"))) for rule in rules}

    states = [Fact(name, concept, True) for concept in chain]
    stated = [prontoqa.sentence(states[0]), prontoqa.sentence(Fact(name, decoy, True))]
    rng.shuffle(stated)
    conclusion = Fact(name, claimed, False, last.negated)
    claim = Fact(name, claimed, False, rng.random() < 0.5)
    proof = zip(states, [*links, last], strict=True)
    steps = (f"{prontoqa.sentence(state)} {sentences[rule]}" for state, rule in proof)
    return Problem(
        question=" ".join([*sentences.values(), *stated, prontoqa.CLAIM_PREFIX + prontoqa.sentence(claim)]),
        steps=(*steps, prontoqa.sentence(conclusion)),
        answer=str(claim == conclusion),
        graph=_graph(name, chain, rules),
    )


def _graph(name: str, chain: list[str], rules: list[Fact]) -> Graph:
    """The rules between concepts, with symbols in the order of the real files: name, chain, the rest alphabetically.

    neg_target is the first symbol after the chain, as in the real files, and has no meaning. The real files omit
    concepts that occur only in a single plural sentence, about one per problem; ours omit none.
    """
    edges = [(rule.subject, rule.predicate) for rule in rules if rule.kind]
    concepts = {rule.subject for rule in rules} | {concept for _, concept in edges}
    symbols = (name, *chain, *sorted(concepts - set(chain)))
    index_of = {symbol: index for index, symbol in enumerate(symbols)}
    return Graph(
        symbols=symbols,
        edges=tuple((index_of[x], index_of[y]) for x, y in edges),
        root=0,
        target=len(chain),
        neg_target=len(chain) + 1,
        chain_concepts=tuple(chain),
    )
