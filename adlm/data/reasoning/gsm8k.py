"""Readers for the original and the prose format of GSM8K, and the anchors of its reasoning. Independent of graphs.

The processed files (gsm_valid.json, gsm_test.json) are read by `problem.read_problems`. A step is a calculator
annotation, `<<16-3-4=9>>`; the prose format has none, so its whole reasoning is one step.
"""

import re
from pathlib import Path

from adlm.data.reasoning.problem import Problem, read_text, text_field
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
        problems.append(parse_original(text_field(entry, "question", where), text_field(entry, "answer", where), where))
    return tuple(problems)


def parse_original(question: str, annotated: str, where: str) -> Problem:
    """The problem of a question and its annotated reasoning, which ends with `####` and the result."""
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
