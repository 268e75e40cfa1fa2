"""How often a rule that searches no path solves ProsQA: of the two offered answers, take the one farther from a name.

    python experiments/reasoning/shortcut.py prosqa_test.json

The distance of an answer is the number of steps from its nearest name, whoever the question is about.
"""

import json
import re
import sys
from pathlib import Path

from paths import Graph, graph_of


def steps_from(names: set[str], edges: Graph) -> dict[str, int]:
    """The number of steps to every node that can be reached."""
    steps, level = dict.fromkeys(names, 0), names
    while level:
        level = set().union(*(edges.get(node, set()) for node in level)) - steps.keys()
        steps |= dict.fromkeys(level, max(steps.values()) + 1)
    return steps


def main() -> None:
    right = ties = 0
    problems = json.loads(Path(sys.argv[1]).read_text())
    for problem in problems:
        edges, _ = graph_of(problem["question"])
        steps = steps_from({node for node in edges if node[0].isupper()}, edges)
        first, second = re.findall(r"an? (\w+) or (\w+)\?", problem["question"])[0]
        ties += steps[first] == steps[second]
        if steps[first] != steps[second]:
            farther = max(first, second, key=steps.__getitem__)
            right += farther == problem["answer"].strip().rstrip(".").split()[-1]
    share = (right + ties / 2) / len(problems)
    print(f"right in {right} of {len(problems) - ties} problems; {ties} ties; {share:.1%} with half of the ties")


if __name__ == "__main__":
    main()
