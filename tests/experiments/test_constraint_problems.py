"""The random problems of experiments/constraints are what they claim to be: feasible with their witness, or not."""

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

import adlm
from adlm.constraints.byte_automata import DEAD
from adlm.constraints.patterns import byte_automaton

PATH = Path(__file__).parents[2] / "experiments" / "constraints" / "problems.py"
SPEC = importlib.util.spec_from_file_location("constraint_problems", PATH)
PROBLEMS = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = PROBLEMS
SPEC.loader.exec_module(PROBLEMS)


def accepts(constraint, text):
    automaton, state = byte_automaton(constraint), 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state == DEAD:
            return False
    return bool(automaton.final[state])


@pytest.mark.parametrize("make", PROBLEMS.FEASIBLE, ids=lambda make: make.__name__)
def test_a_witness_satisfies_its_constraint_and_its_check(make):
    rng = random.Random(3)
    for _ in range(15):
        problem = make(rng)
        assert problem.is_satisfied(problem.witness), problem
        assert accepts(problem.constraint, problem.witness), problem


def test_texts_near_a_witness_are_accepted_if_the_check_passes():
    """The check and the automaton agree on texts with one character more, less or changed."""
    rng, num = random.Random(4), Counter()
    for make in (PROBLEMS.regex_problem, PROBLEMS.words_problem, PROBLEMS.characters_problem):
        for _ in range(20):
            problem = make(rng)
            for _ in range(10):
                place, letter = rng.randrange(len(problem.witness)), rng.choice(["", "a", " ", "0", "é", "–", "xy"])
                text = problem.witness[:place] + letter + problem.witness[place + rng.randint(0, 1) :]
                assert accepts(problem.constraint, text) == problem.is_satisfied(text), (problem, text)
                num[problem.kind, problem.is_satisfied(text)] += 1
    assert min(num.values()) > 10  # accepted and refused, of each kind
    assert len(num) == 6


@pytest.mark.slow
def test_random_problems_are_satisfied_and_infeasible_ones_refused():
    lm = adlm.load()
    satisfied, failures = PROBLEMS.check_feasible(lm, num=60, seed=5, batch=20, steps=4)
    assert (sum(satisfied.values()), failures) == (60, [])
    refused, failures, seconds = PROBLEMS.check_infeasible(lm, num=100, seed=5)
    assert (sum(refused.values()), failures) == (100, [])
    assert seconds < 10
