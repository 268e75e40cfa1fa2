"""GSM8K: grade-school maths word problems, in three formats, and their anchor labels. There is no generator.

The processed files (gsm_valid.json, gsm_test.json) are read by `problems.read_problems`. A step is a calculator
annotation, `<<16-3-4=9>>`; the prose format has none, so its whole reasoning is one step.
"""

import re
from pathlib import Path
from typing import Any

from adlm.apps.reasoning.problems import Problem, ProblemSet, read_problems, read_text, text_field
from adlm.data.sources.corpora import Hub
from adlm.errors import UserError
from adlm.files import parse_json

MARK = re.compile(r"<<[^<>]*>>")
# A minus is a sign unless it follows a number, word or closing bracket: -5, (-5), =-5, but 9 and 5 in 9-5.
NUMBER = re.compile(r"(?:(?<![\w.)%])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def read_original(path: Path) -> tuple[Problem, ...]:
    """GSM8K as published: one {question, answer} per line; the answer is annotated reasoning, `####` and the result."""
    problems = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON ({error}); expected {{question, answer}}") from None
        problems.append(_parse_original(entry, where))
    return tuple(problems)


def _parse_original(entry: Any, where: str) -> Problem:
    """The problem of a question and its annotated reasoning, which ends with `####` and the result."""
    question, annotated = text_field(entry, "question", where), text_field(entry, "answer", where)
    reasoning, answer = _split(annotated, "####", where)
    return Problem(question, tuple(MARK.findall(reasoning)), answer)


def read_prose(path: Path) -> tuple[Problem, ...]:
    """One `question||reasoning #### answer` per line (train_no_aug.txt); the prose reasoning is one step."""
    problems = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        question, rest = _split(line, "||", where)
        reasoning, answer = _split(rest, "####", where)
        problems.append(Problem(question, (reasoning,) if reasoning else (), answer))
    return tuple(problems)


def anchor_labels(problem: Problem) -> tuple[str, ...]:
    """The numbers of the steps in order: 16 3 4 9 2 18 for <<16-3-4=9>> <<9*2=18>>.

    A result that is also the first number of the next step is listed once. Other repetitions stay: <<3*3=9>> is 3 3 9.
    Thousands separators are removed.
    """
    labels: list[str] = []
    for step in problem.steps:
        numbers = [number.replace(",", "") for number in NUMBER.findall(step)]
        labels += numbers[1:] if labels and numbers[:1] == labels[-1:] else numbers
    return tuple(labels)


def _lines(path: Path) -> list[tuple[int, str]]:
    """The non-empty lines with their numbers from 1; split at newlines only, as questions contain other separators."""
    return [(n, line.strip()) for n, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]


def _split(text: str, mark: str, where: str) -> tuple[str, str]:
    before, *after = text.split(mark)
    if len(after) != 1:
        raise UserError(f"{where} has {mark!r} {len(after)} times; expected it once, with the rest after it")
    return before.strip(), after[0].strip()


def _hub_text(record: Any) -> str:
    """The document of a record of GSM8K on the Hub."""
    return _parse_original(record, "a record of the hub").as_text()


GSM8K = ProblemSet(
    title="GSM8K: grade-school maths word problems with calculation steps",
    folders=("gsm8k",),
    files={"train": ("train.jsonl",), "valid": ("gsm_valid.json",), "test": ("test.jsonl", "gsm_test.json")},
    hub=Hub("openai/gsm8k", "main", splits={"train": "train", "test": "test"}, text=_hub_text),
    origin="train.jsonl and test.jsonl are in github.com/openai/grade-school-math, and gsm_icot.bash of "
    "github.com/facebookresearch/coconut makes gsm_valid.json; problems that are generated: data=prosqa "
    "data.problems=20000",
    labels=anchor_labels,
    label_prefix="",
    readers={".json": read_problems, ".jsonl": read_original, ".txt": read_prose},
)
