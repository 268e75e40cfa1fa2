"""GSM8K: its original lines, its prose lines, and the numbers of a trace. Knows no graphs.

The processed files (gsm_valid.json, gsm_test.json) are plain problem arrays: `problem.read_problems` reads them. A step
is a calculator mark, `<<16-3-4=9>>`; the prose form has no marks, so its whole reasoning is one step.
"""

import json
import re
from pathlib import Path

from adlm.data.reasoning.problem import Problem, read_text, text_field
from adlm.errors import UserError

MARK = re.compile(r"<<[^<>]*>>")
# A minus is a sign where no number, word or bracket stands before it: -5, (-5), =-5, but 9 and 5 in 9-5.
NUMBER = re.compile(r"(?:(?<![\w.)%])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def read_original(path: Path) -> tuple[Problem, ...]:
    """GSM8K as published: one {question, answer} a line, the answer's reasoning marked, its result after `####`."""
    problems = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON ({error}); expected {{question, answer}}") from None
        problems.append(original(text_field(entry, "question", where), text_field(entry, "answer", where), where))
    return tuple(problems)


def original(question: str, marked: str, where: str) -> Problem:
    """A problem whose reasoning is marked, with its result after `####`."""
    reasoning, answer = _split(marked, "####", where)
    return Problem(question, tuple(MARK.findall(reasoning)), answer)


def read_prose(path: Path) -> tuple[Problem, ...]:
    """`question||reasoning #### answer` a line (train_no_aug.txt); the reasoning is prose, and stays one step."""
    problems = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        question, rest = _split(line, "||", where)
        reasoning, answer = _split(rest, "####", where)
        problems.append(Problem(question, (reasoning,) if reasoning else (), answer))
    return tuple(problems)


def anchor_labels(problem: Problem) -> tuple[str, ...]:
    """The numbers of the trace in order: 16 3 4 9 2 18 for <<16-3-4=9>> <<9*2=18>>.

    A result with which the next step begins is one number, not two. Other repetitions stay: <<3*3=9>> is 3 3 9.
    Thousands lose their commas.
    """
    labels: list[str] = []
    for step in problem.steps:
        numbers = [number.replace(",", "") for number in NUMBER.findall(step)]
        labels += numbers[1:] if labels and numbers[:1] == labels[-1:] else numbers
    return tuple(labels)


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, counted from 1; only a newline ends a line, for questions hold other separators."""
    return [(n, line.strip()) for n, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]


def _split(text: str, mark: str, where: str) -> tuple[str, str]:
    before, *after = text.split(mark)
    if len(after) != 1:
        raise UserError(f"{where} has {mark!r} {len(after)} times; expected it once, with the rest after it")
    return before.strip(), after[0].strip()
