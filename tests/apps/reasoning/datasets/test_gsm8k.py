"""GSM8K: its formats agree, and the numbers of the steps are its anchors."""

import json
import re

import pytest

from adlm.apps.reasoning.datasets.gsm8k import anchor_labels, read_original, read_prose
from adlm.apps.reasoning.problems import Problem, read_problems
from adlm.errors import UserError


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        (["<<16-3-4=9>>", "<<9*2=18>>"], "16 3 4 9 2 18"),  # the specification's example
        (["<<3*3=9>>", "<<9*60=540>>"], "3 3 9 60 540"),
        (["<<2/2=1>>", "<<2+1=3>>"], "2 2 1 2 1 3"),
        (["<<-5+2=-3>>", "<<4*(-3)=-12>>"], "-5 2 -3 4 -3 -12"),
        (["<<(8-2)-(3)=3>>"], "8 2 3 3"),
        (["<<.5*4=2>>", "<<2.50-.25=2.25>>"], ".5 4 2 2.50 .25 2.25"),
        (["At $1,035 each, 10 cost $10,350. That is 50%-20 more."], "1035 10 10350 50 20"),
        ([], ""),
    ],
)
def test_the_anchors_are_the_numbers_of_the_steps_in_order(steps, labels):
    assert anchor_labels(Problem("q", tuple(steps), "a")) == tuple(labels.split())


def test_the_calculator_annotations_of_the_original_are_the_steps(tmp_path):
    reasoning = "Ana has 2*3=<<2*3=6>>6 pens.\nShe loses one, 6-1=<<6-1=5>>5.\n#### 5"
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "How many?\u2028", "answer": reasoning}, ensure_ascii=False) + "\n\n")
    assert read_original(path) == (Problem("How many?\u2028", ("<<2*3=6>>", "<<6-1=5>>"), "5"),)


def test_prose_is_one_step(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("How many?||She has 2*3 = 6. She loses 1. #### 5\nAnd now?||#### 1,000\n")
    assert read_prose(path) == (
        Problem("How many?", ("She has 2*3 = 6. She loses 1.",), "5"),
        Problem("And now?", (), "1,000"),
    )


@pytest.mark.parametrize(
    ("read", "line", "says"),
    [
        (read_original, "{", "line 2 is not JSON"),
        (read_original, "[" * 100_000, "line 2 is not JSON .it is nested too deeply"),
        (read_original, '{"question": "q"}', "line 2 has no 'answer'"),
        (read_original, '{"question": "q", "answer": "no mark"}', "line 2 has '####' 0 times"),
        (read_original, '{"question": "q", "answer": "a #### 1 #### 2"}', "line 2 has '####' 2 times"),
        (read_original, '["q"]', "line 2 is a list"),
        (read_prose, "q|| a", "line 2 has '####' 0 times"),
        (read_prose, "q #### 1", r"line 2 has '\|\|' 0 times"),
    ],
)
def test_a_damaged_line_is_a_user_error_that_names_it(tmp_path, read, line, says):
    path = tmp_path / "train"
    path.write_text("\n" + line)
    with pytest.raises(UserError, match=f"^{path}, {says}"):
        read(path)


def test_the_original_and_the_processed_test_set_are_the_same_problems(data_folder):
    folder = data_folder / "gsm8k"
    processed = read_problems(folder / "gsm_test.json")
    assert processed == read_original(folder / "test.jsonl")
    assert len(processed) == 1319
    # exceptions: without a mark, the original has no step and the processed file one empty step, which is left out
    assert sum(not problem.steps for problem in processed) == 18


def test_the_processed_valid_set_and_the_prose_file_partition_the_original_training_set(data_folder):
    folder = data_folder / "gsm8k"
    valid, prose = read_problems(folder / "gsm_valid.json"), read_prose(folder / "train_no_aug.txt")
    original = read_original(folder / "train.jsonl")
    by_question = {plain(problem.question): problem for problem in original}
    assert len(by_question) == len(original) == len(valid) + len(prose)
    for problem in valid:
        assert problem == by_question.pop(plain(problem.question))
    for problem in prose:
        marked = by_question.pop(plain(problem.question))
        assert problem.answer.replace(",", "") == marked.answer.replace(",", "")
    assert not by_question


def plain(question: str) -> str:
    """The prose file has lost line breaks."""
    return re.sub(r"\s+", " ", question).strip()
