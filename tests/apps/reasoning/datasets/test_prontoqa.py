"""ProntoQA: provable claims are found, and every flaw of a problem is detected."""

import json
import random
from dataclasses import replace

import pytest
from puzzles import WORDINGS, prontoqa_error, solve_prontoqa

from adlm.apps.reasoning.datasets import prontoqa
from adlm.apps.reasoning.datasets.prontoqa import Fact
from adlm.apps.reasoning.problems import Problem, read_problems
from adlm.errors import UserError

FACTS = (
    "Each wumpus is an impus. Impuses are not shiny. Every wumpus is round. Gumpuses are shiny. Wumpuses are dopuses. "
    "Each lopus is a gopus. Ada is a wumpus. Ada is a lopus."
)
STEPS = ("Ada is a wumpus. Each wumpus is an impus.", "Ada is an impus. Impuses are not shiny.", "Ada is not shiny.")
GOOD = Problem(f"{FACTS} True or false: Ada is not shiny.", STEPS, "True")


def test_a_provable_claim_is_true_and_its_negation_false():
    assert solve_prontoqa(GOOD.question) == "True"
    assert solve_prontoqa(GOOD.question.replace("Ada is not", "Ada is")) == "False"
    assert prontoqa_error(GOOD) is None
    assert prontoqa_error(replace(GOOD, question=f"{FACTS} True or false: Ada is shiny.", answer="False")) is None


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (replace(GOOD, answer="False"), "the answer is True"),
        (replace(GOOD, question=f"{FACTS} Ada is a gumpus. True or false: Ada is shiny."), "both follow"),
        (replace(GOOD, question=f"{FACTS} True or false: Ada is loud."), "neither follows"),
        (replace(GOOD, steps=STEPS[1:]), "does not follow from the step before"),
        (replace(GOOD, steps=(STEPS[0], STEPS[2])), "does not decide"),
        (replace(GOOD, steps=STEPS[:2]), "not pairs"),
        (replace(GOOD, steps=()), "not pairs"),
        (
            replace(GOOD, steps=("Ada is a wumpus. Each wumpus is a gumpus.", *STEPS[1:])),
            "is not a rule of the question",
        ),
        (
            replace(GOOD, steps=("Ada is a lopus. Each wumpus is an impus.", *STEPS[1:])),
            "is not a rule of the question",
        ),
        (replace(GOOD, steps=("Ada is a wumpus. Wumpuses are impuses.", *STEPS[1:])), "is not a rule of the question"),
        (replace(GOOD, steps=(*STEPS[:2], "Ada is shiny.")), "does not decide"),
        (replace(GOOD, steps=("Ada is a wumpus. Every wumpus is round.", "Ada is round.")), "does not decide"),
        (replace(GOOD, question=FACTS), "is not facts and"),
        (replace(GOOD, question=""), "is not facts and"),
        (replace(GOOD, question="Some wumpus is odd. " + GOOD.question), "is not a ProntoQA sentence"),
    ],
)
def test_every_flaw_is_detected(problem, says):
    assert says in prontoqa_error(problem)


def test_the_anchors_are_the_predicates_of_the_steps():
    assert prontoqa.anchor_labels(GOOD) == ("Ada", "wumpus", "impus")


def shuffled(problem: Problem, rng: random.Random) -> Problem:
    """The same puzzle in another order and other wordings."""
    puzzle = prontoqa.parse(problem.question)
    facts = [prontoqa.sentence(fact, rng.choice(WORDINGS)) for fact in puzzle.facts]
    rng.shuffle(facts)
    return replace(problem, question=" ".join([*facts, prontoqa.CLAIM_PREFIX + prontoqa.sentence(puzzle.claim)]))


def test_content_ignores_order_wording_and_negation_of_the_claim_and_nothing_else():
    rng = random.Random(0)
    for _ in range(20):
        assert prontoqa.content(shuffled(GOOD, rng)) == prontoqa.content(GOOD)
    assert prontoqa.content(replace(GOOD, question=GOOD.question.replace("Ada is not", "Ada is"))) == prontoqa.content(
        GOOD
    )
    for old, new in (("are shiny", "are not shiny"), ("round", "loud"), ("lopus", "mopus"), ("Ada", "Bo")):
        assert prontoqa.content(replace(GOOD, question=GOOD.question.replace(old, new))) != prontoqa.content(GOOD)


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize(
    "fact",
    [
        Fact("wumpus", "impus", True),
        Fact("impus", "wumpus", True),
        Fact("wumpus", "luminous", False),
        Fact("impus", "nervous", False, True),
        Fact("Ada", "impus", True),
        Fact("Ada", "nervous", False, True),
    ],
)
def test_parsing_a_sentence_inverts_writing_it(fact, wording):
    assert prontoqa.read_fact(prontoqa.sentence(fact, wording)) == fact


def test_other_sentences_are_refused():
    for text in ("wumpuses are impuses.", "Each wumpus are shiny.", "Ada is happy", "Each wumpus is not an impus."):
        with pytest.raises(UserError, match="is not a ProntoQA sentence"):
            prontoqa.read_fact(text)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_every_real_problem_is_proved(data_folder, split):
    path = data_folder / "prontoqa" / f"prontoqa_{split}.json"
    problems = read_problems(path)
    assert len(problems) == {"valid": 200, "test": 800}[split]
    assert [prontoqa_error(problem) for problem in problems] == [None] * len(problems)
    for problem, entry in zip(problems, json.loads(path.read_text()), strict=True):
        assert prontoqa.anchor_labels(problem)[1:] == tuple(entry["chain_concepts"])
