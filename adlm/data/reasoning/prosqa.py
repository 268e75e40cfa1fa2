"""Parses and solves ProsQA questions. Independent of how problems are generated.

A question is a list of facts, `Tom is a terpus.` and `Every terpus is a brimpus.`, and a choice, `Is Tom a lempus or
scrompus?`; exactly one of the two can be reached. The article is always `a`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adlm.data.reasoning.problem import Problem
from adlm.data.reasoning.series import canonical_form
from adlm.errors import UserError

FACT = re.compile(r"(?:Every ([a-z]+)|([A-Z][a-z]*)) is a ([a-z]+)\.")
CHOICE = re.compile(r"Is ([A-Z][a-z]*) a ([a-z]+) or ([a-z]+)\?")
SENTENCE = re.compile(r"[^.?]+[.?]")

Fact = tuple[str, str]
"""(x, y): x is a y. A name begins with a capital, a concept does not."""


@dataclass(frozen=True)
class ChoiceQuestion:
    """A parsed question: its facts in order, the entity it asks about, and the two options in order."""

    facts: tuple[Fact, ...]
    entity: str
    options: tuple[str, str]


def sentence(fact: Fact) -> str:
    """The sentence that states a fact."""
    subject, concept = fact
    return f"{subject} is a {concept}." if subject[0].isupper() else f"Every {subject} is a {concept}."


def choice(entity: str, options: Sequence[str]) -> str:
    """The sentence that asks for one of two options."""
    return f"Is {entity} a {options[0]} or {options[1]}?"


def read_fact(text: str) -> Fact:
    """The fact that a sentence states."""
    match = FACT.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a ProsQA fact; expected 'Tom is a terpus.' or 'Every terpus is a brimpus.'")
    return match[1] or match[2], match[3]


def parse(question: str) -> ChoiceQuestion:
    """The facts and the choice of a question; every character must belong to one."""
    sentences = [text.strip() for text in SENTENCE.findall(question)]
    if " ".join(sentences) != question or not sentences:
        raise UserError(f"the question {question[:60]!r} is not sentences with one space between them, as ProsQA's are")
    match = CHOICE.fullmatch(sentences[-1])
    if match is None:
        raise UserError(f"{sentences[-1]!r} is not a ProsQA question; expected 'Is Tom a lempus or scrompus?'")
    return ChoiceQuestion(tuple(map(read_fact, sentences[:-1])), match[1], (match[2], match[3]))


def distances(facts: Iterable[Fact], start: str) -> dict[str, int]:
    """The number of facts in the shortest proof from `start` to everything that can be proved of it."""
    after: dict[str, list[str]] = {}
    for x, y in facts:
        after.setdefault(x, []).append(y)
    found, queue = {start: 0}, [start]
    for x in queue:
        for y in after.get(x, ()):
            if y not in found:
                found[y] = found[x] + 1
                queue.append(y)
    return found


def solve(question: str) -> str:
    """The answer derived from the question: the one option that can be proved of the entity."""
    puzzle = parse(question)
    reached = distances(puzzle.facts, puzzle.entity)
    proved = [option for option in puzzle.options if option in reached]
    if len(proved) != 1:
        raise UserError(f"of {' and '.join(puzzle.options)}, {len(proved)} can be proved of {puzzle.entity}, not one")
    return sentence((puzzle.entity, proved[0]))


def flaw(problem: Problem) -> str | None:
    """The first error in a problem, or None if its steps prove its answer.

    In a valid proof the answer is the only option that follows, the steps are facts of the question that form a path
    from the entity to the answer, and no path is shorter.
    """
    try:
        puzzle, answer = parse(problem.question), solve(problem.question)
        steps = [read_fact(step) for step in problem.steps]
    except UserError as error:
        return str(error)
    if problem.answer != answer:
        return f"the answer is {answer!r}, not {problem.answer!r}"
    here = puzzle.entity
    for x, y in steps:
        if (x, y) not in puzzle.facts:
            return f"the step {sentence((x, y))!r} is not a fact of the question"
        if x != here:
            return f"the step {sentence((x, y))!r} does not continue from {here}"
        here = y
    if answer != sentence((puzzle.entity, here)):
        return f"the steps end at {here}"
    shortest = distances(puzzle.facts, puzzle.entity)[here]
    return None if len(steps) == shortest else f"{len(steps)} steps, where {shortest} are enough"


def anchor_labels(problem: Problem) -> tuple[str, ...]:
    """The nodes of the path in order: the name, then the concept of each step (Tom, terpus, brimpus, lempus)."""
    facts = [read_fact(step) for step in problem.steps]
    return tuple(subject for subject, _ in facts[:1]) + tuple(concept for _, concept in facts)


def content(problem: Problem) -> str:
    """A form of the question that ignores the order of its facts and options."""
    puzzle = parse(problem.question)
    return " ".join([*map(sentence, sorted(puzzle.facts)), choice(puzzle.entity, sorted(puzzle.options))])


def structure(problem: Problem) -> str:
    """A form of the question that ignores, besides, which names and concepts it uses."""
    puzzle = parse(problem.question)
    colours = {node: "name" if node[0].isupper() else "concept" for fact in puzzle.facts for node in fact}
    colours[puzzle.entity] = "entity"
    colours |= dict.fromkeys(puzzle.options, "option")
    return canonical_form(colours, ((x, y, "is") for x, y in puzzle.facts))
