"""How often rules that search no path and write no proof solve ProsQA and ProntoQA.

    python experiments/reasoning/shortcut.py prosqa_test.json
    python experiments/reasoning/shortcut.py prontoqa_test.json

ProsQA: of the two offered answers, take the one farther from a name. The distance of an answer is the number of steps
from its nearest name, whoever the question is about. ProntoQA: of the rules about the property of the claim, believe
the one whose concept is mentioned most often.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from paths import Graph, graph_of

from adlm.data.reasoning.prontoqa import CLAIM_PREFIX, parse


def steps_from(names: set[str], edges: Graph) -> dict[str, int]:
    """The number of steps to every node that can be reached."""
    steps, level = dict.fromkeys(names, 0), names
    while level:
        level = set().union(*(edges.get(node, set()) for node in level)) - steps.keys()
        steps |= dict.fromkeys(level, max(steps.values()) + 1)
    return steps


def farther_option(question: str) -> str | None:
    """The answer to a question of ProsQA by the rule; None for a tie."""
    edges, _ = graph_of(question)
    steps = steps_from({node for node in edges if node[0].isupper()}, edges)
    first, second = re.findall(r"an? (\w+) or (\w+)\?", question)[0]
    return None if steps[first] == steps[second] else max(first, second, key=steps.__getitem__)


def most_mentioned(question: str) -> str | None:
    """The answer to a question of ProntoQA by the rule; None for a tie."""
    puzzle = parse(question)
    mentions = Counter(word for fact in puzzle.facts for word in (fact.subject, fact.predicate))
    rules = [fact for fact in puzzle.facts if fact.predicate == puzzle.claim.predicate]
    most = max(mentions[rule.subject] for rule in rules)
    believed = {rule.negated for rule in rules if mentions[rule.subject] == most}
    return None if len(believed) > 1 else str(believed == {puzzle.claim.negated})


def main() -> None:
    problems = json.loads(Path(sys.argv[1]).read_text())
    rule = most_mentioned if CLAIM_PREFIX in problems[0]["question"] else farther_option
    found = [(rule(problem["question"]), problem["answer"].strip().rstrip(".").split()[-1]) for problem in problems]
    ties = sum(answer is None for answer, _ in found)
    right = sum(answer == expected for answer, expected in found)
    share = (right + ties / 2) / len(problems)
    print(f"right in {right} of {len(problems) - ties} problems; {ties} ties; {share:.1%} with half of the ties")


if __name__ == "__main__":
    main()
