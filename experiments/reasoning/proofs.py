"""Where written proofs of ProntoQA go wrong, and whether answers to ProsQA are among the two that are offered.

    python experiments/reasoning/proofs.py runs/*/*.jsonl --test prontoqa_test.json prosqa_test.json --out proofs.json

The answers are those that `adlm reason eval MODEL --data NAME --out FILE` wrote. A proof of ProntoQA has six steps, one
a line: five of a fact and a rule (`Fae is a zumpus. Every zumpus is melodic.`), and the conclusion (`Fae is melodic.`).
The last rule, in step 5, is the only one that may have a *not*, and decides the answer.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.apps.reasoning.datasets.prontoqa import CLAIM_PREFIX
from adlm.apps.reasoning.datasets.prosqa import parse
from adlm.apps.reasoning.problems import read_problems

NUM_STEPS = 6
PROPERTY = re.compile(r"(?:is|are) (not )?(\w+)\.$")


def count_proofs(answers: Sequence[Mapping[str, Any]], steps_of: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Of answers to ProntoQA: steps that are right word for word, and how the last ones follow from each other."""
    steps_right = [0] * NUM_STEPS
    counts: Counter[str] = Counter()
    for answer in answers:
        steps = steps_of[answer["question"]]
        written = [line.strip() for line in answer["written"].split("#")[0].strip().split("\n")]
        for number, (ours, expected) in enumerate(zip(written, steps, strict=False)):
            steps_right[number] += ours == expected
        counts["first_four_right"] += written[:4] == list(steps[:4])
        counts["true"] += answer["answer"] == "True"
        counts["false"] += answer["answer"] == "False"
        if len(written) < NUM_STEPS:
            continue
        rule, conclusion = written[4], written[5]
        but_for_not = rule.replace(" not ", " ") == steps[4].replace(" not ", " ")
        claim = answer["question"].rpartition(CLAIM_PREFIX)[2]
        counts["last_rule_but_for_not"] += but_for_not
        counts["last_rule"] += rule == steps[4]
        counts["conclusion_follows_own_rule"] += _property(rule) is not None and _property(rule) == _property(
            conclusion
        )
        counts["answer_follows_own_conclusion"] += answer["answer"] == str(conclusion == claim)
    names = ("first_four_right", "last_rule_but_for_not", "last_rule", "true", "false")
    follows = ("conclusion_follows_own_rule", "answer_follows_own_conclusion")
    return {**_common(answers), "steps_right": steps_right, **{name: counts[name] for name in (*names, *follows)}}


def count_options(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of answers to ProsQA: those that say of the one who is asked about that it is one of the two offered concepts."""
    offered = 0
    for answer in answers:
        question = parse(answer["question"])
        names = "|".join(question.options)
        offered += re.fullmatch(rf"{question.entity} is an? ({names})\.", answer["answer"]) is not None
    return {**_common(answers), "offered": offered}


def _common(answers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {"num": len(answers), "right": sum(answer["right"] for answer in answers)}


def _property(text: str) -> tuple[str | None, str] | None:
    """Whether a sentence negates, and what it ends with."""
    match = PROPERTY.search(text)
    return match and (match[1], match[2])


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One table of ProntoQA and one of ProsQA."""
    proofs = {name: result for name, result in results.items() if "steps_right" in result}
    options = {name: result for name, result in results.items() if "offered" in result}
    columns = ("ProntoQA", "right", "True / False", "steps 1 to 6 right", "first four right")
    last_columns = ("last rule right but for *not*", "of these, *not* right")
    follows = ("conclusion follows own rule", "answer follows own conclusion")
    header = (*columns, *last_columns, *follows)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name, result in proofs.items():
        steps = ", ".join(map(str, result["steps_right"]))
        cells = (result["right"], f"{result['true']} / {result['false']}", steps, result["first_four_right"])
        last = ("last_rule_but_for_not", "last_rule", "conclusion_follows_own_rule", "answer_follows_own_conclusion")
        lines.append(f"| `{name}` | {' | '.join(map(str, (*cells, *(result[key] for key in last))))} |")
    lines += ["", "| ProsQA | right | one of the two offered answers | problems |", f"|{'---|' * 4}"]
    lines += [f"| `{name}` | {row['right']} | {row['offered']} | {row['num']} |" for name, row in options.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+", help="named in the output by folder and file: GROUP/ROW")
    parser.add_argument("--test", type=Path, nargs="+", required=True, help="the files of problems")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    steps_of = {problem.question: problem.steps for file in arguments.test for problem in read_problems(file)}
    results = {}
    for path in arguments.answers:
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        is_proof = CLAIM_PREFIX in answers[0]["question"]
        name = f"{path.parent.name}/{path.stem}"
        results[name] = count_proofs(answers, steps_of) if is_proof else count_options(answers)
    print(markdown(results))
    if arguments.out:
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
        arguments.out.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
