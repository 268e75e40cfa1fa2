"""The counts of experiments/reasoning are right on problems small enough to count by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from sweep import Results

FOLDER = Path(__file__).parents[2] / "experiments" / "reasoning"
FACTS = "Each tumpus is a gorpus. Gorpuses are not happy. Each wumpus is happy. Alex is a tumpus. Alex is a lempus."
QUESTION = f"{FACTS} True or false: Alex is happy."
STEPS = (
    "Alex is a tumpus. Each tumpus is a gorpus.",
    "Alex is a gorpus. Gorpuses are lempuses.",
    "Alex is a lempus. Lempuses are sterpuses.",
    "Alex is a sterpus. Every sterpus is a numpus.",
    "Alex is a numpus. Each numpus is not happy.",
    "Alex is not happy.",
)


@pytest.fixture
def module(monkeypatch):
    """Loads a script by name, under a name of its own; scripts import their neighbours as when they are run."""
    monkeypatch.syspath_prepend(FOLDER)

    def load(name: str):
        spec = importlib.util.spec_from_file_location(f"reasoning_{name}", FOLDER / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded)  # dataclasses look their module up
        spec.loader.exec_module(loaded)
        return loaded

    return load


def solution(steps: tuple[str, ...], answer: str) -> dict:
    written = "\n".join((*steps, f"### {answer}"))
    return {"question": QUESTION, "written": written, "answer": answer, "right": answer == "False"}


def test_proofs_are_counted_step_by_step_and_by_what_follows_from_what(module):
    wrong_not = (*STEPS[:4], "Alex is a numpus. Each numpus is happy.", "Alex is happy.")
    wrong_start = ("Alex is a lempus. Lempuses are gorpuses.", *STEPS[1:5], "Alex is happy.")
    answers = [
        solution(STEPS, "False"),
        solution(wrong_not, "True"),  # a coin at the last rule, and all that follows from it
        solution(wrong_start, "False"),  # its conclusion contradicts its rule, its answer contradicts its conclusion
        solution((), "False"),  # No-CoT
    ]
    assert module("proofs").count_proofs(answers, {QUESTION: STEPS}) == {
        "num": 4,
        "right": 3,
        "steps_right": [2, 3, 3, 3, 2, 1],
        "first_four_right": 2,
        "last_rule_but_for_not": 3,
        "last_rule": 2,
        "true": 1,
        "false": 3,
        "conclusion_follows_own_rule": 2,
        "answer_follows_own_conclusion": 2,
    }


def test_an_answer_to_prosqa_is_offered_only_if_name_and_concept_are(module):
    question = "Tom is a terpus. Bob is a lempus. Every terpus is a scrompus. Is Tom a lempus or scrompus?"
    said = ("Tom is a scrompus.", "Tom is a lempus.", "Tom is a terpus.", "Bob is a lempus.", "")
    answers = [{"question": question, "answer": answer, "right": answer == said[0]} for answer in said]
    assert module("proofs").count_options(answers) == {"num": 5, "right": 1, "offered": 2}


def test_proofs_are_printed_and_written_by_group_and_row(module, tmp_path, monkeypatch, capsys):
    (tmp_path / "group").mkdir()
    answers, test, out = tmp_path / "group" / "cot-0.jsonl", tmp_path / "test.json", tmp_path / "proofs.json"
    answers.write_text(json.dumps(solution(STEPS, "False")) + "\n")
    test.write_text(json.dumps([{"question": QUESTION, "steps": STEPS, "answer": "False"}]))
    monkeypatch.setattr(sys, "argv", ["proofs.py", str(answers), "--test", str(test), "--out", str(out)])
    module("proofs").main()
    assert "| `group/cot-0` | 1 | 0 / 1 | 1, 1, 1, 1, 1, 1 | 1 | 1 | 1 | 1 | 1 |" in capsys.readouterr().out
    assert json.loads(out.read_text())["group/cot-0"]["last_rule"] == 1


def test_prontoqa_is_solved_by_counting_mentions(module):
    most_mentioned = module("shortcut").most_mentioned
    assert most_mentioned(QUESTION) == "False"  # gorpus is mentioned twice, wumpus once
    assert most_mentioned(f"{FACTS} True or false: Alex is not happy.") == "True"
    assert most_mentioned(f"{FACTS} Each lempus is a wumpus. True or false: Alex is happy.") is None


def test_of_the_rules_for_prosqa_one_measures_distances_and_the_others_look_at_facts(module):
    shortcut = module("shortcut")
    facts = "Tom is a wumpus. Every wumpus is a gorpus. Every gorpus is a dumpus. Eva is a numpus. Eva is a dumpus."
    answers = {
        rule.__name__: shortcut.by_rule(rule)(f"{facts} Is Tom a gorpus or numpus?") for rule in shortcut.PROSQA_RULES
    }
    assert answers == {
        "farther_from_a_name": "Tom is a gorpus.",
        "offered_first": "Tom is a gorpus.",
        "mentioned_later": "Tom is a numpus.",
        "not_said_of_a_name": "Tom is a gorpus.",
        "mentioned_less": "Tom is a numpus.",
        "neighbours_mentioned_less": None,  # wumpus and Eva are mentioned twice
    }


def test_every_row_follows_from_its_solved_problems():
    results = Results(FOLDER / "results.jsonl").of("trial")
    for row in results.values():
        assert row.get("needs", "") in {"", *(result["row"] for result in results.values())}
        if solved := row.get("solved"):
            assert (len(solved), solved.count("1")) == (row["num"], row["right"])
