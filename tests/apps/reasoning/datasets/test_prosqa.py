"""ProsQA: provable options are found, and every flaw of a problem is detected."""

import json
import random
from dataclasses import replace

import pytest
from puzzles import prosqa_error, solve_prosqa

from adlm.apps.reasoning.datasets import prosqa
from adlm.apps.reasoning.problems import Problem, read_problems
from adlm.errors import UserError

FACTS = (
    "Ada is a wug. Every wug is a dax. Every dax is a blick. Every wug is a toma. Every toma is a fep. "
    "Every fep is a blick. Bo is a zav. Every zav is a kiv. Every zav is a fep. Bo is a dax."
)
STEPS = ("Ada is a wug.", "Every wug is a dax.", "Every dax is a blick.")
GOOD = Problem(f"{FACTS} Is Ada a kiv or blick?", STEPS, "Ada is a blick.")


def test_the_provable_option_is_the_answer():
    assert solve_prosqa(GOOD.question) == "Ada is a blick."
    assert prosqa_error(GOOD) is None


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (replace(GOOD, answer="Ada is a kiv."), "the answer is 'Ada is a blick.'"),
        (replace(GOOD, steps=STEPS[:2]), "end at dax"),
        (replace(GOOD, steps=STEPS[1:]), "does not continue from Ada"),
        (replace(GOOD, steps=("Bo is a dax.", STEPS[2])), "does not continue from Ada"),
        (replace(GOOD, steps=("Ada is a dax.", STEPS[2])), "is not a fact"),
        (replace(GOOD, steps=()), "end at Ada"),
        (
            replace(
                GOOD,
                steps=(STEPS[0], "Every wug is a toma.", "Every toma is a fep.", "Every fep is a blick."),
            ),
            "4 steps, where 3 are enough",
        ),
        (replace(GOOD, question=f"{FACTS} Is Bo a kiv or blick?"), "2 can be proved of Bo"),
        (replace(GOOD, question=f"{FACTS} Is Ada a kiv or zav?"), "0 can be proved of Ada"),
        (replace(GOOD, question=FACTS), "is not a ProsQA question"),
        (replace(GOOD, question=""), "not sentences"),
        (replace(GOOD, question=GOOD.question.replace(" Bo is a dax.", " Bo is an ox.")), "is not a ProsQA fact"),
        (replace(GOOD, question=GOOD.question + " Why"), "not sentences"),
    ],
)
def test_every_flaw_is_detected(problem, says):
    assert says in prosqa_error(problem)


def test_the_anchors_are_the_concepts_that_the_steps_lead_to():
    assert prosqa.anchor_labels(GOOD) == ("Ada", "wug", "dax", "blick")


def reworded(problem: Problem, names: dict[str, str], rng: random.Random) -> Problem:
    """The same puzzle in another order and under other names."""
    puzzle = prosqa.parse(problem.question)
    facts = [(names.get(x, x), names.get(y, y)) for x, y in puzzle.facts]
    options = [names.get(option, option) for option in puzzle.options]
    rng.shuffle(facts)
    rng.shuffle(options)
    entity = names.get(puzzle.entity, puzzle.entity)
    return replace(problem, question=" ".join([*map(prosqa.sentence, facts), prosqa.choice(entity, options)]))


def test_structure_ignores_the_order_and_the_names_and_nothing_else():
    rng = random.Random(0)
    words = ["wug", "dax", "blick", "toma", "fep", "zav", "kiv"]
    for _ in range(20):
        names = dict(zip(words, rng.sample(words, len(words)), strict=True)) | {"Ada": "Cy"}
        assert prosqa.structure(reworded(GOOD, names, rng)) == prosqa.structure(GOOD)
    # one edge turned, one edge moved, another option asked about: another structure
    for old, new in (
        ("Every fep is a blick", "Every blick is a fep"),
        ("Bo is a dax", "Bo is a toma"),
        ("or blick?", "or dax?"),
    ):
        assert prosqa.structure(replace(GOOD, question=GOOD.question.replace(old, new))) != prosqa.structure(GOOD)


def test_parsing_a_sentence_inverts_writing_it():
    for fact in (("Ada", "wug"), ("wug", "impus")):
        assert prosqa.read_fact(prosqa.sentence(fact)) == fact
    for text in ("ada is a wug.", "Every Ada is a wug.", "Ada is a wug", "Every wug is not a dax."):
        with pytest.raises(UserError, match="is not a ProsQA fact"):
            prosqa.read_fact(text)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_every_real_problem_is_proved_by_a_shortest_chain(data_folder, split):
    path = data_folder / "prosqa" / f"prosqa_{split}.json"
    problems = read_problems(path)
    assert len(problems) == {"valid": 300, "test": 500}[split]
    assert [prosqa_error(problem) for problem in problems] == [None] * len(problems)
    for problem, entry in zip(problems, json.loads(path.read_text()), strict=True):
        puzzle, symbols = prosqa.parse(problem.question), entry["idx_to_symbol"]
        root, target, wrong = (symbols[entry[key]] for key in ("root", "target", "neg_target"))
        assert {(symbols[a], symbols[b]) for a, b in entry["edges"]} == set(puzzle.facts)
        assert problem.answer == prosqa.sentence((root, target))
        assert set(puzzle.options) == {target, wrong}


def test_no_real_valid_problem_is_a_test_problem_renamed(data_folder):
    valid, test = (read_problems(data_folder / "prosqa" / f"prosqa_{split}.json") for split in ("valid", "test"))
    assert {prosqa.structure(p) for p in valid}.isdisjoint(prosqa.structure(p) for p in test)
