"""ProntoQA: decide whether a statement is true, by a proof of five hops. Read and generated.

A question states rules in three wordings (`Each tumpus is a gorpus.` `Every tumpus is not happy.` `Tumpuses are
gorpuses.`), says what someone is (`Alex is a tumpus.`), and asks `True or false: Alex is not happy.`
All 1,000 real problems have the same skeleton; they differ in words, negations, wordings and order.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

from adlm.apps.reasoning.problems import Problem, ProblemSet
from adlm.errors import UserError

# Concepts are invented words, so that problems can be solved only from their sentences [Saparov and He, 2023].
NAMES = ("Alex", "Fae", "Max", "Polly", "Rex", "Sally", "Sam", "Stella", "Wren")
STEMS = "brim dum gor grim im jom lem lor num rom shum ster tum vum wum yum zum"
CONCEPTS = tuple(f"{stem}pus" for stem in STEMS.split())
PROPERTY_FAMILIES = (
    ("blue", "brown", "orange", "red"),
    ("large", "small"),
    ("liquid", "luminous", "metallic", "wooden"),
    ("opaque", "transparent"),
    ("feisty", "happy", "nervous", "shy"),
    ("bright", "dull"),
    ("bitter", "sour", "spicy", "sweet"),
    ("earthy", "floral", "fruity"),
    ("cold", "hot", "temperate"),
    ("aggressive", "amenable", "angry", "kind", "mean"),
    ("discordant", "loud", "melodic", "muffled"),
    ("fast", "moderate", "slow"),
    ("overcast", "rainy", "snowy", "sunny", "windy"),
)
"""A problem uses at most one word of each family, so that properties do not contradict each other."""

ONE = re.compile(r"(Each|Every) ([a-z]+) is (?:an? ([a-z]+us)|(not )?([a-z]+))\.")
MANY = re.compile(r"([A-Z][a-z]*us)es are (?:([a-z]+us)es|(not )?([a-z]+))\.")
SOMEONE = re.compile(r"([A-Z][a-z]*) is (?:an? ([a-z]+us)|(not )?([a-z]+))\.")
CLAIM_PREFIX = "True or false: "


@dataclass(frozen=True)
class Fact:
    """`subject` is (or, if negated, is not) `predicate`; names begin with a capital, concepts do not."""

    subject: str
    predicate: str
    kind: bool
    """True for a concept (`is a tumpus`), False for a property (`is happy`)."""
    negated: bool = False


@dataclass(frozen=True)
class ClaimQuestion:
    """A parsed question: its facts in order, and the claim to decide."""

    facts: tuple[Fact, ...]
    claim: Fact


def sentence(fact: Fact, wording: str = "Each") -> str:
    """The sentence that states a fact; `wording` does not apply to facts about a name."""
    subject, predicate = fact.subject, fact.predicate
    if fact.kind:
        phrase = f"{'an' if predicate[0] in 'aeiou' else 'a'} {predicate}"
    else:
        phrase = f"not {predicate}" if fact.negated else predicate
    if subject[0].isupper():
        return f"{subject} is {phrase}."
    if wording == "Many":
        return f"{subject.capitalize()}es are {predicate + 'es' if fact.kind else phrase}."
    return f"{wording} {subject} is {phrase}."


def read_fact(text: str) -> Fact:
    """The fact that a sentence states, in any wording."""
    if match := ONE.fullmatch(text):
        subject, concept, negated, word = match[2], match[3], match[4], match[5]
    elif match := MANY.fullmatch(text) or SOMEONE.fullmatch(text):
        subject, concept, negated, word = match[1], match[2], match[3], match[4]
        subject = subject.lower() if match.re is MANY else subject
    else:
        raise UserError(f"{text!r} is not a ProntoQA sentence; expected 'Each tumpus is a gorpus.' or the like")
    return Fact(subject, concept or word, bool(concept), bool(negated))


def parse(question: str) -> ClaimQuestion:
    """The facts and the claim of a question; every character must belong to one."""
    *facts, claim = re.findall(r"[^.]+\.", question) or [""]
    if "".join([*facts, claim]) != question or not claim.strip().startswith(CLAIM_PREFIX):
        raise UserError(
            f"the question {question[:60]!r} is not facts and 'True or false: Alex is happy.', as ProntoQA's"
        )
    return ClaimQuestion(
        tuple(read_fact(text.strip()) for text in facts), read_fact(claim.strip().removeprefix(CLAIM_PREFIX))
    )


def anchor_labels(problem: Problem) -> tuple[str, ...]:
    """The nodes of the proof in order: the name, then the concepts (Alex, tumpus, gorpus). A property is not a node."""
    facts = [read_fact(step.partition(". ")[0].removesuffix(".") + ".") for step in problem.steps]
    return tuple(fact.subject for fact in facts[:1]) + tuple(fact.predicate for fact in facts if fact.kind)


def content(problem: Problem) -> str:
    """A form of the question that ignores the order and wording of its facts, and a negation of the claim."""
    puzzle = parse(problem.question)
    claim = Fact(puzzle.claim.subject, puzzle.claim.predicate, puzzle.claim.kind)
    return " ".join([*sorted(map(sentence, puzzle.facts)), CLAIM_PREFIX + sentence(claim)])


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


REAL = Skeleton()


def draw(rng: random.Random, skeleton: Skeleton = REAL) -> Problem:
    """A chain of concepts c1 ... ch, a branch at each, one more concept after the last, and two decoys.

    The first decoy is a second concept of the name and leads to another concept; the second has the property of the
    claim negated. Every concept has a property, except the one after the chain and the one the first decoy leads to.
    """
    hops = skeleton.hops
    name = rng.choice(NAMES)
    words = rng.sample(CONCEPTS, 2 * hops + 4)
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
    sentences = {rule: sentence(rule, rng.choice(("Each", "Every", "Many", "Many"))) for rule in rules}

    states = [Fact(name, concept, True) for concept in chain]
    stated = [sentence(states[0]), sentence(Fact(name, decoy, True))]
    rng.shuffle(stated)
    conclusion = Fact(name, claimed, False, last.negated)
    claim = Fact(name, claimed, False, rng.random() < 0.5)
    proof = zip(states, [*links, last], strict=True)
    steps = (f"{sentence(state)} {sentences[rule]}" for state, rule in proof)
    return Problem(
        question=" ".join([*sentences.values(), *stated, CLAIM_PREFIX + sentence(claim)]),
        steps=(*steps, sentence(conclusion)),
        answer=str(claim == conclusion),
    )


PRONTOQA = ProblemSet(
    title="ProntoQA: decide whether a statement is true, by a proof of five hops (data.problems generates problems)",
    folders=("prontoqa",),
    files={split: (f"prontoqa_{split}.json",) for split in ("train", "valid", "test")},
    origin="preprocessing/prontoqa.py of github.com/facebookresearch/coconut makes them from "
    "github.com/asaparov/prontoqa; or generate problems: data.problems=20000",
    labels=anchor_labels,
    draw=draw,
    form=content,  # a form up to renaming would forbid most draws, since there is a single skeleton
)
