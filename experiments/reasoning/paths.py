"""What ACoT's slots predict on ProsQA: the label, another node that leads to the answer, or one that does not.

    python experiments/reasoning/paths.py runs/acot-0.jsonl --tokenizer SmolLM2/tokenizer.json

The answers are those that `adlm reason eval MODEL --data prosqa --out FILE` wrote. Often several ways lead from
the name to the answer, and the labels are the nodes of one of them, so a slot can be off its label and on a good way:
position i is *reachable* if it predicts (the first token of) a node i steps from the name, and *to the answer* if the
answer can be reached from that node. Beside it stands the share of such nodes among those i steps away, which is what
a slot that walks blindly would reach.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

Graph = dict[str, set[str]]


def graph_of(question: str) -> tuple[Graph, str]:
    """The edges of a question, and the name it asks about."""
    facts, _, asked = question.rpartition(" Is ")
    edges: Graph = defaultdict(set)
    for node, parent in re.findall(r"(\w+) is an? (\w+)\.", facts):
        edges[node].add(parent)
    return edges, asked.split()[0]


def nodes_leading_to(goal: str, edges: Graph) -> set[str]:
    found, added = {goal}, {goal}
    while added:
        added = {node for node, parents in edges.items() if parents & added} - found
        found |= added
    return found


def analyse(answers: list[dict], first_token: Callable[[str], str]) -> dict:
    """Shares by position from [BOA] on, and accuracy by what all positions of a problem predict together."""
    positions: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    outcomes: dict[str, list[bool]] = {"all labels": [], "another way to the answer": [], "neither": []}
    for answer in answers:
        edges, name = graph_of(answer["question"])
        good = nodes_leading_to(answer["expected"].rstrip(".").split()[-1], edges)
        level, on_label, on_way = {name}, True, True
        for position, label in enumerate(answer["labels"][: answer["num_slots"]]):
            token = answer["slots"][position]
            is_label, is_good = token == first_token(label), token in map(first_token, level & good)
            values = positions[position]
            values["label"].append(is_label)
            values["reachable"].append(token in map(first_token, level))
            values["to the answer"].append(is_good)
            values["to the answer, blindly"].append(len(level & good) / len(level) if level else 0.0)
            on_label, on_way = on_label and is_label, on_way and is_good
            level = set().union(*(edges.get(node, set()) for node in level))
        outcomes["all labels" if on_label else "another way to the answer" if on_way else "neither"].append(
            answer["right"]
        )
    return {
        "positions": [
            {name: round(sum(found) / len(found), 4) for name, found in values.items()} | {"num": len(values["label"])}
            for _, values in sorted(positions.items())
        ],
        "outcomes": {name: {"right": sum(found), "num": len(found)} for name, found in outcomes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of the model")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(arguments.tokenizer)

    def first_token(word: str) -> str:
        return tokenizer.decode([tokenizer.encode(f" {word}", add_special_tokens=False).ids[0]])

    results = {
        path.stem: analyse([json.loads(line) for line in path.read_text().splitlines()], first_token)
        for path in arguments.answers
    }
    for name, result in results.items():
        columns = list(result["positions"][0])
        print(f"\n{name}\n\n| position | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for number, values in enumerate(result["positions"]):
            cells = [str(values[column]) if column == "num" else f"{values[column]:.0%}" for column in columns]
            print(f"| {number or '[BOA]'} | {' | '.join(cells)} |")
        for outcome, found in result["outcomes"].items():
            print(f"{outcome}: {found['right']} of {found['num']} solved")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
