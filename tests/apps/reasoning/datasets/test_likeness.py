"""Generated problems resemble the real validation sets: two-sample tests of counts in the questions.

Each statistic is read from the text, so that real and made problems are measured alike. A difference counts where
chance would show it once in a thousand comparisons (z > 3.1); the seed is fixed, so a test passes always or never.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from reasoning_runs import generate_prontoqa, generate_prosqa

from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.datasets.prontoqa import Skeleton
from adlm.apps.reasoning.datasets.prosqa import Shape
from adlm.apps.reasoning.problems import forbidden_forms, read_problems

SIGNIFICANT = 3.1
NUM_MADE = 3000
# Of the 300 valid problems 64 prove exactly 11 things of the entity: a lump that neither the 500 test problems (66, and
# chi-square z = -0.4) nor ours have. There only the distribution functions are compared.
LUMPY = {("prosqa", "valid"): {"proved of the entity"}}
FAMILY = {word: index for index, family in enumerate(prontoqa.PROPERTY_FAMILIES) for word in family}


def chi_square_z(a, b):
    """How many standard deviations the two samples' counts differ, as a normal variable (Wilson and Hilferty, 1931)."""
    counts_a, counts_b = Counter(a), Counter(b)
    bins, held = [], np.zeros(2)
    for value in sorted(counts_a.keys() | counts_b.keys()):
        held = held + np.array([counts_a[value], counts_b[value]])
        if held.sum() * min(len(a), len(b)) / (len(a) + len(b)) >= 5:
            bins.append(held)
            held = np.zeros(2)
    if not bins or (len(bins) == 1 and not held.any()):
        return 0.0
    bins[-1] = bins[-1] + held
    table = np.array(bins)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    freedom = max(len(bins) - 1, 1)
    ratio = ((table - expected) ** 2 / expected).sum() / freedom
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def kolmogorov_smirnov_z(a, b):
    """The largest gap between the two distribution functions, on the scale where 1.95 is once in a thousand."""
    values = np.union1d(a, b)
    gap = np.abs(
        np.searchsorted(np.sort(a), values, "right") / len(a) - np.searchsorted(np.sort(b), values, "right") / len(b)
    ).max()
    return float(gap * math.sqrt(len(a) * len(b) / (len(a) + len(b))) / 1.95 * SIGNIFICANT)


def num_shortest(facts, start, end):
    """How many proofs have the least number of steps."""
    distance = prosqa.distances(facts, start)
    ways = Counter({start: 1})
    for x, y in sorted((fact for fact in facts if fact[0] in distance), key=lambda fact: distance[fact[0]]):
        if distance[y] == distance[x] + 1:
            ways[y] += ways[x]
    return ways[end]


def prosqa_statistics(problems):
    """Lists of numbers, one a problem or one a node, by the name of what they count."""
    found = {}

    def note(name, *values):
        found.setdefault(name, []).extend(values)

    for problem in problems:
        puzzle = prosqa.parse(problem.question)
        facts, right = puzzle.facts, problem.answer.split()[-1].rstrip(".")
        (wrong,) = set(puzzle.options) - {right}
        nodes = {node for fact in facts for node in fact}
        num_in, num_out = Counter(y for _, y in facts), Counter(x for x, _ in facts)
        proved = prosqa.distances(facts, puzzle.entity)
        note("hops", len(problem.steps))
        note("sentences", len(facts))
        note("nodes", len(nodes))
        note("names", sum(node[0].isupper() for node in nodes))
        note("parents of a node", *(num_in[node] for node in nodes if num_in[node]))
        note("children of a node", *(num_out[node] for node in nodes))
        note("shortest proofs", num_shortest(facts, puzzle.entity, right))
        note("proved of the entity", len(proved) - 1)
        note("facts about the entity", num_out[puzzle.entity])
        note("parents of the answer", num_in[right])
        note("parents of the wrong option", num_in[wrong])
        note("parents of the wrong option that are proved", sum(x in proved for x, y in facts if y == wrong))
        note("the answer comes first", puzzle.options[0] == right)
        note("the answer is mentioned less", np.sign(num_in[right] - num_in[wrong]))
        note("the answer's last fact comes later", facts_place(facts, right) > facts_place(facts, wrong))
        note("deepest leaf", max(proved.values()) - len(problem.steps))
        note("name", prosqa.NAMES.index(puzzle.entity))
        note("concept", *(prosqa.CONCEPTS.index(node) for node in nodes if node[0].islower()))
    return found


def facts_place(facts, node):
    return max(place for place, (_, y) in enumerate(facts) if y == node)


def prontoqa_statistics(problems):
    """As above; wordings are 0 Each, 1 Every, 2 plural."""
    found = {}

    def note(name, *values):
        found.setdefault(name, []).extend(values)

    for problem in problems:
        puzzle = prontoqa.parse(problem.question)
        facts, claim = puzzle.facts, puzzle.claim
        rules = [fact for fact in facts if fact.subject[0].islower()]
        properties = [fact for fact in rules if not fact.kind]
        chain = prontoqa.anchor_labels(problem)[1:]
        texts = problem.question.split(". ")[: len(facts)]
        note("steps", len(problem.steps))
        note("sentences", len(facts))
        note("concepts", len({fact.subject for fact in rules} | {fact.predicate for fact in rules if fact.kind}))
        note("properties", len(properties))
        note("negations", sum(fact.negated for fact in properties))
        note("negated in the chain", *(f.negated for f in properties if f.subject in chain[:-1]))
        note("negated beside it", *(f.negated for f in properties if f.subject not in chain and f.predicate in FAMILY))
        note("negated at the end", *(f.negated for f in properties if f.subject == chain[-1]))
        note("answer", problem.answer == "True")
        note("claim negated", claim.negated)
        note("answer and claim", 2 * (problem.answer == "True") + claim.negated)
        note("wording", *(text.startswith("Every ") + 2 * text.split()[0].endswith("uses") for text in texts[:-2]))
        note("the proof's name comes first", facts[-2].predicate == chain[0])
        note("about someone", sum(fact.subject[0].isupper() for fact in facts))
        note("mentions of the asked property", sum(fact.predicate == claim.predicate for fact in properties))
        note("families", len({FAMILY[fact.predicate] for fact in properties}))
        note("family", *(FAMILY[fact.predicate] for fact in properties))
        note("asked family", FAMILY[claim.predicate])
        note("place of the last rule", place_of(facts, chain[-1], claim.predicate))
        note("rules about a concept", *Counter(fact.subject for fact in rules).values())
    return found


def place_of(facts, subject, predicate):
    return next(i for i, fact in enumerate(facts) if (fact.subject, fact.predicate) == (subject, predicate))


STATISTICS = {"prosqa": prosqa_statistics, "prontoqa": prontoqa_statistics}
GENERATE = {"prosqa": generate_prosqa, "prontoqa": generate_prontoqa}


def differing(real, made, lumpy=frozenset()):
    """The statistics by which the two sets can be told apart, with how clearly."""
    found = {}
    for name in real:
        if len(set(real[name])) == 1:
            apart = float("inf") if set(real[name]) != set(made[name]) else 0.0
        else:
            counts = 0.0 if name in lumpy else chi_square_z(real[name], made[name])
            apart = max(counts, kolmogorov_smirnov_z(real[name], made[name]))
        if apart > SIGNIFICANT:
            found[name] = apart
    return found


@pytest.fixture(scope="module")
def made():
    """Measured once: three thousand problems of each kind."""
    return {task: STATISTICS[task](GENERATE[task](NUM_MADE, 2024)) for task in STATISTICS}


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("task", STATISTICS)
def test_generated_problems_have_the_statistics_of_real_ones(data_folder, made, task, split):
    real = STATISTICS[task](read_problems(data_folder / task / f"{task}_{split}.json"))
    assert differing(real, made[task], LUMPY.get((task, split), frozenset())) == {}


@pytest.mark.parametrize("task", STATISTICS)
def test_two_seeds_have_the_same_statistics(made, task):
    assert differing(STATISTICS[task](GENERATE[task](300, 5)), made[task]) == {}


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        ({"num_nodes": 26}, "nodes"),
        ({"mean_parents": 1.9}, "sentences"),
        ({"depth_weight": 0.5}, "facts about the entity"),
        ({"min_hops": 4}, "hops"),
        ({"first_share": 0.2, "second_share": 0.3}, "names"),
    ],
)
def test_another_shape_would_be_detected(made, change, seen_in):
    other = prosqa_statistics(generate_prosqa(300, 5, shape=replace(Shape(), **change)))
    assert seen_in in differing(other, made["prosqa"])


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        ({"hops": 4}, "sentences"),
        ({"branch_negated": 0.5}, "negations"),
        ({"last_negated": 0.2}, "negated at the end"),
    ],
)
def test_another_skeleton_would_be_detected(made, change, seen_in):
    other = prontoqa_statistics(generate_prontoqa(200, 5, skeleton=replace(Skeleton(), **change)))
    assert seen_in in differing(other, made["prontoqa"])


@pytest.mark.parametrize("task", STATISTICS)
def test_answers_are_balanced(made, task):
    said = made[task]["the answer comes first" if task == "prosqa" else "answer"]
    assert abs(np.mean(said) - 0.5) < 3.1 * 0.5 / math.sqrt(NUM_MADE)


def test_generated_training_sets_are_disjoint_from_the_test_sets(data_folder):
    """ProsQA under any renaming, ProntoQA by content."""
    test = {task: data_folder / task / f"{task}_test.json" for task in STATISTICS}
    renamed = forbidden_forms([test["prosqa"]], prosqa.structure)
    assert not any(problem in renamed for problem in generate_prosqa(1000, 0))
    said = forbidden_forms([test["prontoqa"]], prontoqa.content)
    assert not any(problem in said for problem in generate_prontoqa(1000, 0, forbidden=said))
