"""How often rules that ignore who is asked about, or write no proof, solve ProsQA and ProntoQA.

    python experiments/reasoning/shortcut.py prosqa_test.json
    python experiments/reasoning/shortcut.py prontoqa_test.json

Each rule of ProsQA scores the two offered answers and takes the one with the higher score. Only `farther from a name`
searches the graph: the distance of an answer is the number of steps from its nearest name, whoever the question is
about. The others look at an answer, or at the facts in which it occurs. ProntoQA: of the rules about the property of
the claim, believe the one whose concept is mentioned most often.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.datasets.prosqa import ChoiceQuestion
from adlm.apps.reasoning.problems import read_problems

Scores = tuple[float, float]


def farther_from_a_name(puzzle: ChoiceQuestion) -> Scores:
    names = {x for x, _ in puzzle.facts if x[0].isupper()}
    reached = [prosqa.distances(puzzle.facts, name) for name in names]
    first, second = (min(steps[option] for steps in reached if option in steps) for option in puzzle.options)
    return first, second


def offered_first(puzzle: ChoiceQuestion) -> Scores:
    return 1, 0


def mentioned_later(puzzle: ChoiceQuestion) -> Scores:
    """By the first fact that mentions it."""
    concepts = [concept for _, concept in puzzle.facts]
    return concepts.index(puzzle.options[0]), concepts.index(puzzle.options[1])


def not_said_of_a_name(puzzle: ChoiceQuestion) -> Scores:
    of_names = Counter(y for x, y in puzzle.facts if x[0].isupper())
    return -of_names[puzzle.options[0]], -of_names[puzzle.options[1]]


def mentioned_less(puzzle: ChoiceQuestion) -> Scores:
    mentions = Counter(word for fact in puzzle.facts for word in fact)
    return -mentions[puzzle.options[0]], -mentions[puzzle.options[1]]


def neighbours_mentioned_less(puzzle: ChoiceQuestion) -> Scores:
    """By the mentions of all of which the answer is said directly: one step back, no further."""
    mentions = Counter(word for fact in puzzle.facts for word in fact)
    first, second = (-sum(mentions[x] for x, y in puzzle.facts if y == option) for option in puzzle.options)
    return first, second


PROSQA_RULES = (
    farther_from_a_name,
    offered_first,
    mentioned_later,
    not_said_of_a_name,
    mentioned_less,
    neighbours_mentioned_less,
)


def by_rule(rule: Callable[[ChoiceQuestion], Scores]) -> Callable[[str], str | None]:
    """The answer to a question of ProsQA by the rule; None for a tie."""

    def answer(question: str) -> str | None:
        puzzle = prosqa.parse(question)
        first, second = rule(puzzle)
        chosen = puzzle.options[0] if first > second else puzzle.options[1]
        return None if first == second else prosqa.sentence((puzzle.entity, chosen))

    return answer


def most_mentioned(question: str) -> str | None:
    """The answer to a question of ProntoQA by the rule; None for a tie."""
    puzzle = prontoqa.parse(question)
    mentions = Counter(word for fact in puzzle.facts for word in (fact.subject, fact.predicate))
    rules = [fact for fact in puzzle.facts if fact.predicate == puzzle.claim.predicate]
    most = max(mentions[rule.subject] for rule in rules)
    believed = {rule.negated for rule in rules if mentions[rule.subject] == most}
    return None if len(believed) > 1 else str(believed == {puzzle.claim.negated})


def main() -> None:
    problems = read_problems(Path(sys.argv[1]))
    is_prontoqa = prontoqa.CLAIM_PREFIX in problems[0].question
    rules = {rule.__name__: by_rule(rule) for rule in PROSQA_RULES}
    for name, answer in {"most_mentioned": most_mentioned}.items() if is_prontoqa else rules.items():
        answers = [answer(problem.question) for problem in problems]
        ties = answers.count(None)
        right = sum(given == problem.answer for given, problem in zip(answers, problems, strict=True))
        share = (right + ties / 2) / len(problems)
        print(f"{name.replace('_', ' ')}: {share:.1%}, ties by a coin ({right} of {len(problems) - ties}; {ties} ties)")


if __name__ == "__main__":
    main()
