"""Solvers of ProntoQA and ProsQA, and checks of their proofs: what the tests hold problems against."""

import re

from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.problems import Problem
from adlm.errors import UserError

WORDINGS = ("Each", "Every", "Many")
"""Of the rules of ProntoQA."""


def proved_in_prontoqa(puzzle: prontoqa.ClaimQuestion) -> set[prontoqa.Fact]:
    """All facts that can be proved about the subject of the claim."""
    name = puzzle.claim.subject
    rules: dict[str, list[prontoqa.Fact]] = {}
    for fact in puzzle.facts:
        rules.setdefault(fact.subject, []).append(fact)
    found: set[prontoqa.Fact] = set()
    queue = [name]
    for subject in queue:
        for rule in rules.get(subject, ()):
            fact = prontoqa.Fact(name, rule.predicate, rule.kind, rule.negated)
            if fact not in found:
                found.add(fact)
                queue += [rule.predicate] if rule.kind else []
    return found


def solve_prontoqa(question: str) -> str:
    """The answer, "True" or "False", derived from the question: exactly one of the claim and its negation follows."""
    puzzle = prontoqa.parse(question)
    claim, found = puzzle.claim, proved_in_prontoqa(puzzle)
    opposite = prontoqa.Fact(claim.subject, claim.predicate, claim.kind, not claim.negated)
    if (claim in found) == (opposite in found):
        follows = "both follow" if claim in found else "neither follows"
        raise UserError(f"of {prontoqa.sentence(claim)!r} and its opposite, {follows}; one must")
    return str(claim in found)


def prontoqa_error(problem: Problem) -> str | None:
    """The first error in a problem of ProntoQA, or None if its steps prove its answer.

    In a valid proof the answer follows from the question and its negation does not. Each step except the last states a
    fact about the subject, given or derived in the step before, and quotes a rule of the question about its predicate.
    The last step is the conclusion of the last rule, which decides the claim.
    """
    try:
        puzzle, answer = prontoqa.parse(problem.question), solve_prontoqa(problem.question)
        steps = [[prontoqa.read_fact(text.strip()) for text in re.findall(r"[^.]+\.", step)] for step in problem.steps]
    except UserError as error:
        return str(error)
    if problem.answer != answer:
        return f"the answer is {answer}, not {problem.answer}"
    if not steps or len(steps[-1]) != 1 or any(len(step) != 2 for step in steps[:-1]):
        return "the steps are not pairs of what someone is and a rule, and one last conclusion"
    name = puzzle.claim.subject
    given = {fact for fact in puzzle.facts if fact.subject == name}
    for (held, rule), text in zip(steps[:-1], problem.steps, strict=False):
        if held not in given:
            return f"in the step {text!r} the first sentence does not follow from the step before"
        if (
            rule not in puzzle.facts
            or rule.subject != held.predicate
            or text.partition(". ")[2] not in problem.question
        ):
            return f"in the step {text!r} the second sentence is not a rule of the question about the first"
        given = {prontoqa.Fact(name, rule.predicate, rule.kind, rule.negated)}
    if steps[-1][0] not in given or (steps[-1][0].predicate, steps[-1][0].kind) != (puzzle.claim.predicate, False):
        return f"the last step {problem.steps[-1]!r} does not decide the claim"
    return None


def solve_prosqa(question: str) -> str:
    """The answer derived from the question: the one option that can be proved of the entity."""
    puzzle = prosqa.parse(question)
    reached = prosqa.distances(puzzle.facts, puzzle.entity)
    proved = [option for option in puzzle.options if option in reached]
    if len(proved) != 1:
        raise UserError(f"of {' and '.join(puzzle.options)}, {len(proved)} can be proved of {puzzle.entity}, not one")
    return prosqa.sentence((puzzle.entity, proved[0]))


def prosqa_error(problem: Problem) -> str | None:
    """The first error in a problem of ProsQA, or None if its steps prove its answer.

    In a valid proof the answer is the only option that follows, the steps are facts of the question that form a path
    from the entity to the answer, and no path is shorter.
    """
    try:
        puzzle, answer = prosqa.parse(problem.question), solve_prosqa(problem.question)
        steps = [prosqa.read_fact(step) for step in problem.steps]
    except UserError as error:
        return str(error)
    if problem.answer != answer:
        return f"the answer is {answer!r}, not {problem.answer!r}"
    here = puzzle.entity
    for x, y in steps:
        if (x, y) not in puzzle.facts:
            return f"the step {prosqa.sentence((x, y))!r} is not a fact of the question"
        if x != here:
            return f"the step {prosqa.sentence((x, y))!r} does not continue from {here}"
        here = y
    if answer != prosqa.sentence((puzzle.entity, here)):
        return f"the steps end at {here}"
    shortest = prosqa.distances(puzzle.facts, puzzle.entity)[here]
    return None if len(steps) == shortest else f"{len(steps)} steps, where {shortest} are enough"
