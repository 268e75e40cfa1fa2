"""Generated problems: proved, reproducible, prefixes of one another, disjoint from forbidden ones."""

import hashlib
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from puzzles import prontoqa_error, prosqa_error
from reasoning_runs import generate_prontoqa, generate_prosqa, write_problems

from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.datasets.prontoqa import Skeleton
from adlm.apps.reasoning.datasets.prosqa import Shape
from adlm.apps.reasoning.problems import Forbidden, forbidden_forms
from adlm.errors import UserError

TASKS = {
    "prosqa": (generate_prosqa, prosqa_error, prosqa.structure),
    "prontoqa": (generate_prontoqa, prontoqa_error, prontoqa.content),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def test_every_generated_problem_is_proved(task):
    generate, proof_error, form = task
    problems = list(generate(500, 3))
    assert [proof_error(problem) for problem in problems] == [None] * 500
    assert len({form(problem) for problem in problems}) == 500


def test_a_problem_depends_only_on_its_seed_and_index(task):
    generate, *_ = task
    whole = list(generate(20, 7))
    random.seed(0)  # whatever the program drew before
    assert list(generate(12, 7)) == whole[:12]
    assert list(generate(8, 7, start=12)) == whole[12:]
    assert not set(whole) & set(generate(20, 8))


def test_the_problems_of_a_seed_never_change():
    def digest(problems):
        told = [(problem.question, problem.steps, problem.answer) for problem in problems]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    assert digest(generate_prosqa(5, 0)) == "10ce6aeb14f6e6d6"
    assert digest(generate_prontoqa(5, 0)) == "21eb6c020362cfb1"


def test_forbidden_problems_are_skipped_and_nothing_else_changes(task, tmp_path):
    generate, proof_error, form = task
    plain = list(generate(30, 1))
    unwanted = [replace(plain[4], steps=()), replace(plain[11], answer="?")]  # the question is what counts
    write_problems(tmp_path / "test.json", unwanted)
    forbidden = forbidden_forms([tmp_path / "test.json"], form)
    kept = list(generate(30, 1, forbidden=forbidden))
    assert not any(problem in forbidden for problem in kept)
    changed = [index for index, problem in enumerate(plain) if problem in forbidden]
    assert {4, 11} <= set(changed)
    assert [index for index in range(30) if kept[index] != plain[index]] == changed
    assert all(proof_error(problem) is None for problem in kept)


def test_a_renamed_copy_is_forbidden_by_structure():
    problem = next(generate_prosqa(1, 0))
    first, second, *_ = dict.fromkeys(concept for _, concept in prosqa.parse(problem.question).facts)
    other = {first: second, second: first}
    swapped = re.sub(r"\w+", lambda word: other.get(word[0], word[0]), problem.question)
    copy = replace(problem, question=swapped)
    assert copy.question != problem.question
    assert copy in Forbidden(prosqa.structure, frozenset([prosqa.structure(problem)]))


def test_forbidding_everything_is_a_user_error():
    everything = Forbidden(lambda problem: "", frozenset([""]))
    with pytest.raises(UserError, match="all 10000 draws for problem 2 are forbidden"):
        next(generate_prontoqa(1, 0, start=2, forbidden=everything))


def test_generated_prosqa_graphs_have_no_circle_and_two_leaves_as_options():
    for problem in generate_prosqa(200, 5):
        puzzle = prosqa.parse(problem.question)
        assert len(set(puzzle.facts)) == len(puzzle.facts)
        subjects, concepts = ({fact[i] for fact in puzzle.facts} for i in (0, 1))
        assert all(concept[0].islower() for concept in concepts)
        assert all(subject[0].islower() == (subject in concepts) for subject in subjects)
        assert all(subject not in cycle_from(puzzle.facts, subject) for subject in subjects)
        # both options are leaves: an option that leads on would give itself away
        assert not subjects & set(puzzle.options)
        assert 3 <= len(problem.steps) <= 6
        # the wrong option is proved of another name, so it is no stray node either
        [wrong] = set(puzzle.options) - {problem.answer.removesuffix(".").split()[-1]}
        others = [name for name in subjects if name[0].isupper() and name != puzzle.entity]
        assert any(wrong in prosqa.distances(puzzle.facts, other) for other in others)


def cycle_from(facts, start):
    """What can be proved of everything that `start` is: itself only if there is a circle."""
    return {found for x, y in facts if x == start for found in prosqa.distances(facts, y)}


def test_generated_prontoqa_proofs_follow_rules_of_the_question():
    for problem in generate_prontoqa(200, 5):
        puzzle, (name, *chain) = prontoqa.parse(problem.question), prontoqa.anchor_labels(problem)
        rules = {(fact.subject, fact.predicate) for fact in puzzle.facts if fact.kind}
        assert name == puzzle.claim.subject
        assert set(pairwise([name, *chain])) <= rules
        assert len(chain) == 5


@pytest.mark.parametrize("hops", [1, 3, 6])
def test_a_prontoqa_proof_has_the_requested_number_of_hops(hops):
    for problem in generate_prontoqa(20, 0, skeleton=Skeleton(hops=hops)):
        assert prontoqa_error(problem) is None
        assert len(problem.steps) == hops + 1


def test_a_prosqa_proof_has_a_number_of_hops_in_the_requested_range():
    for problem in generate_prosqa(20, 0, shape=Shape(num_nodes=40, min_hops=5, max_hops=5)):
        assert prosqa_error(problem) is None
        assert len(problem.steps) == 5


def test_a_graph_too_small_for_its_hops_is_a_user_error():
    with pytest.raises(UserError, match="ask for fewer hops"):
        next(generate_prosqa(1, 0, shape=Shape(num_nodes=5, min_hops=5)))
