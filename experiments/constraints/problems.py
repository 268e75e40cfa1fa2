"""Fills random constrained holes and checks every text with Python's `re`, `json` and `jsonschema`.

python experiments/constraints/problems.py --model box --num 1000 --infeasible 200 --seed 0

Feasible problems are made from a witness: first the text, then a constraint that it satisfies, and a hole with as many
tokens as the tokenizer encodes it as. Infeasible ones are made so that a short argument shows it, and must be refused
with a `UserError`. The checks share no code with the automata. The result is a summary in JSON; failures are printed in
full, and the exit status is then 1.
"""

import argparse
import json
import random
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

import adlm
from adlm import AllOf, Characters, Choices, JsonSchema, Regex, Words
from adlm.constraints.kinds import Constraint
from adlm.errors import UserError
from adlm.language_model import LanguageModel

MAX_TOKENS = 60
"""Of a hole."""
SAMPLERS = ("ancestral", "remdm-cap", "remdm-loop", "forward-backward", "confidence", "entropy", "left-to-right")
BLOCK_SAMPLERS = ("speculative", "left-to-right", "ancestral", "confidence")
"""Of block-causal models, with one candidate: those of several need their probabilities."""
OPTIONS: list[dict[str, float]] = [{}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 1.4}]
BEFORE, AFTER = "The old man said:", " and went."
ALPHABET = string.ascii_letters + string.digits + " .,-'éßñ日本"
OUTSIDE_ASCII = re.compile("[\u0080-\u00bf\u00d7\u00f7\u2000-\u2bff\u3000-\u303f]")


@dataclass(frozen=True)
class Problem:
    kind: str
    constraint: Constraint
    witness: str
    is_satisfied: Callable[[str], bool]


def random_text(rng: random.Random, least: int = 1, most: int = 8, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(least, most)))


def random_pattern(rng: random.Random, depth: int = 3) -> tuple[str, str]:
    """A regular expression, and a text that it matches."""
    kind = rng.randrange(6 if depth else 2)
    if kind == 0:
        text = random_text(rng, 1, 4, ALPHABET)
        return re.escape(text), text
    if kind == 1:
        name, members = rng.choice(
            [(r"\d", "0379"), (r"\w", "aZ_5"), ("[a-f]", "afc"), ("[^0-9]", "xé "), (".", "q日!"), ("[éa-c]", "éb")]
        )
        least = rng.randint(0, 3)
        times = rng.choice([f"{{{least},{least + rng.randint(1, 4)}}}", "+", "*"])
        return name + times, random_text(rng, max(least, 1), max(least, 1), members)
    if kind in (2, 3):
        parts = [random_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3))]
        return "".join(f"(?:{pattern})" for pattern, _ in parts), "".join(text for _, text in parts)
    pattern, text = random_pattern(rng, depth - 1)
    if kind == 4:
        others = [random_pattern(rng, depth - 1)[0] for _ in range(rng.randint(1, 3))]
        return "|".join(f"(?:{each})" for each in rng.sample([pattern, *others], len(others) + 1)), text
    num = rng.randint(1, 2)
    return f"({pattern}){rng.choice(['+', '*', f'{{{num}}}', f'{{0,{num}}}', f'{{{num},}}'])}", text * num


def regex_problem(rng: random.Random) -> Problem:
    while True:
        pattern, witness = random_pattern(rng)
        if witness:
            break
    return Problem("regex", Regex(pattern), witness, lambda text: re.fullmatch(pattern, text, re.ASCII) is not None)


def choices_problem(rng: random.Random) -> Problem:
    texts = [random_text(rng, 1, 20, ALPHABET) for _ in range(rng.choice([1, 3, 20, 300]))]
    return Problem("choices", Choices(texts), rng.choice(texts), lambda text: text in texts)


def random_value(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    """A JSON schema, and a value that it allows."""
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"])
    if depth:
        kind = rng.choice([kind, "object", "object", "array", "anyOf", "allOf", "prefixItems"])
    if kind == "object":
        names = rng.sample(["name", "age", "tags", "a b", 'q"', "é"], rng.randint(1, 3))
        parts = {name: random_value(rng, depth - 1) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        schema = {"type": "object", "properties": {name: parts[name][0] for name in names}, "required": required}
        if rng.random() < 0.5:
            schema["additionalProperties"] = False
        kept = [name for name in names if name in required or rng.random() < 0.6]
        return schema, {name: parts[name][1] for name in kept}
    if kind == "array":
        item, value = random_value(rng, depth - 1)
        num = rng.randint(0, 3)
        bounds = {"minItems": rng.randint(0, num)} if rng.random() < 0.5 else {}
        bounds |= {"maxItems": num + rng.randint(0, 2)} if rng.random() < 0.5 else {}
        return {"type": "array", "items": item, **bounds}, [value] * num
    if kind == "prefixItems":
        parts = [random_value(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        schema = {"type": "array", "prefixItems": [each for each, _ in parts]}
        return schema | {"minItems": len(parts), "maxItems": len(parts)}, [value for _, value in parts]
    if kind in ("anyOf", "allOf"):
        schema, value = random_value(rng, depth - 1)
        others = [{"type": "null"}, random_value(rng, depth - 1)[0]] if kind == "anyOf" else []
        return {kind: rng.sample([schema, *others], 1 + len(others)), "title": "T"}, value
    if kind in ("integer", "number"):
        value = rng.randint(-2000, 2000) if kind == "integer" else rng.randint(-20000, 20000) / rng.choice([1, 8, 100])
        schema = {"type": kind}
        if rng.random() < 0.5:
            schema["minimum"] = value - rng.choice([0, 0.5, 1, 100])
        if rng.random() < 0.5:
            schema[rng.choice(["exclusiveMaximum", "maximum"])] = value + rng.choice([0.25, 1, 7, 3000])
        return schema, value
    if kind in ("enum", "const"):
        values = [rng.choice([None, True, 3, -1.5, "x", 'a"b', {"a": [1]}, "日本"]) for _ in range(3)]
        return ({"enum": values}, values[0]) if kind == "enum" else ({"const": values[0]}, values[0])
    if kind == "pattern":
        pattern, value = rng.choice([("^[A-Z]{2}[0-9]+$", "AB12"), ("é|b", "aéb"), (r"^\w+(\.\w+)*", "a.b_c")])
        return {"type": "string", "pattern": pattern, "maxLength": len(value) + rng.randint(0, 5)}, value
    if kind == "format":
        return rng.choice(
            [
                ({"type": "string", "format": "date"}, "2024-02-29"),
                ({"type": "string", "format": "time"}, "12:30:00Z"),
                ({"type": "string", "format": "email"}, "ab@c.de"),
                ({"type": "string", "format": "ipv4"}, "10.0.255.1"),
            ]
        )
    if kind == "string":
        value = random_text(rng, 0, 8, ALPHABET + '"\\')
        bounds = {"minLength": rng.randint(0, len(value))} if rng.random() < 0.5 else {}
        bounds |= {"maxLength": len(value) + rng.randint(0, 4)} if rng.random() < 0.5 else {}
        return {"type": "string", **bounds}, value
    return {"type": kind}, rng.random() < 0.5 if kind == "boolean" else None


def schema_problem(rng: random.Random) -> Problem:
    schema, value = random_value(rng, 2)
    if rng.random() < 0.3:
        schema = {"$defs": {"part": schema}, "$ref": "#/$defs/part"}
    draft = jsonschema.Draft202012Validator

    def is_satisfied(text: str) -> bool:
        return draft(schema, format_checker=draft.FORMAT_CHECKER).is_valid(json.loads(text))

    return Problem("schema", JsonSchema(schema), json.dumps(value, ensure_ascii=False), is_satisfied)


def is_word_character(character: str) -> bool:
    return character in string.ascii_letters + string.digits + "_" or (
        not character.isascii() and OUTSIDE_ASCII.match(character) is None
    )


def occurs(word: str, text: str, whole: bool) -> bool:
    starts = [start for start in range(len(text)) if text.startswith(word, start)]
    around = [text[max(0, start - 1) : start] + text[start + len(word) : start + len(word) + 1] for start in starts]
    return any(not whole or not any(map(is_word_character, each)) for each in around)


def words_problem(rng: random.Random) -> Problem:
    words = [random_text(rng, 1, 6) for _ in range(rng.randint(1, 5))]
    witness, whole = rng.choice([" ", ", ", "-"]).join(words), rng.random() < 0.7
    required = rng.sample(words, rng.randint(0, min(3, len(words))))
    others = [random_text(rng, 1, 5) for _ in range(5)]
    forbidden = [word for word in others if not occurs(word, witness, whole)][: rng.randint(0, 3)]
    if not required and not forbidden:
        required = words[:1]

    def is_satisfied(text: str) -> bool:
        found = [occurs(word, text, whole) for word in (*required, *forbidden)]
        return all(found[: len(required)]) and not any(found[len(required) :])

    return Problem("words", Words(required, forbidden, whole), witness, is_satisfied)


def characters_problem(rng: random.Random) -> Problem:
    witness = random_text(rng, 1, 40, ALPHABET)
    least, most = rng.randint(0, len(witness)), len(witness) + rng.randint(0, 10)
    return Problem("characters", Characters(least, most), witness, lambda text: least <= len(text) <= most)


def intersection_problem(rng: random.Random) -> Problem:
    """Of a problem and some more conditions that its witness satisfies."""
    first = rng.choice([regex_problem, choices_problem, schema_problem, words_problem])(rng)
    witness, parts, checks = first.witness, [first.constraint], [first.is_satisfied]
    if rng.random() < 0.7:
        least, most = rng.randint(0, len(witness)), len(witness) + rng.randint(0, 5)
        parts.append(Characters(least, most))
        checks.append(lambda text: least <= len(text) <= most)
    word = random_text(rng, 1, 2)
    if word not in witness or len(parts) == 1:
        start = rng.randrange(len(witness))
        part = witness[start : start + rng.randint(1, 3)]
        forbidden = [word] if word not in witness else []
        parts.append(Words([part], forbidden, whole=False))
        checks.append(lambda text: part in text and not any(each in text for each in forbidden))
    rng.shuffle(parts)
    return Problem("intersection", AllOf(parts), witness, lambda text: all(check(text) for check in checks))


FEASIBLE = (regex_problem, choices_problem, schema_problem, words_problem, characters_problem, intersection_problem)


def infeasible_problem(rng: random.Random, longest: int) -> tuple[str, Callable[[], Constraint], int]:
    """A kind, what makes the constraint, and a number of tokens; `longest` bytes are in the longest token."""
    num, word, other = rng.randint(1, 12), random_text(rng, 3, 8), random_text(rng, 9, 12)
    lower, upper = rng.randint(1, 20), rng.randint(30, 60)
    number = rng.randint(-50, 50)
    cases: list[tuple[str, Callable[[], Constraint], int]] = [
        # fewer bytes than tokens, with one more for a space before the hole
        ("hole too long", lambda: Choices([word, word[:2]]), len(word) + 2 + num),
        ("hole too long", lambda: Regex(f"[a-z]{{0,{lower}}}"), lower + 2 + num),
        ("hole too long", lambda: JsonSchema({"enum": [number, word]}), len(word) + 5 + num),
        # more bytes than so many tokens have
        ("hole too short", lambda: Regex(f"[a-z]{{{num * longest + 1},}}"), num),
        ("hole too short", lambda: Choices([word * (num * longest)]), num),
        ("hole too short", lambda: Characters(longest + 1), 1),
        ("hole too short", lambda: JsonSchema({"type": "string", "minLength": num * longest}), num),
        ("empty intersection", lambda: AllOf([Characters(0, lower), Characters(upper, None)]), num),
        ("empty intersection", lambda: AllOf([Choices([word]), Choices([other, "é"])]), num),
        ("empty intersection", lambda: AllOf([Regex("[a-m]+"), Regex("[n-z]+")]), num),
        ("empty intersection", lambda: AllOf([Words([word]), Words(forbidden=[word])]), num),
        ("empty intersection", lambda: Words([word], [word]), num),
        ("empty intersection", lambda: AllOf([JsonSchema({"type": "integer"}), Words(["x"], whole=False)]), num),
        ("empty intersection", lambda: AllOf([Words([word]), Characters(0, len(word) - 1)]), num),
        ("contradictory schema", lambda: JsonSchema({"type": "integer", "minimum": upper, "maximum": lower}), num),
        ("contradictory schema", lambda: JsonSchema({"enum": [number], "type": "string"}), num),
        (
            "contradictory schema",
            lambda: JsonSchema({"type": "string", "format": "date", "maxLength": lower % 10}),
            num,
        ),
        ("contradictory schema", lambda: JsonSchema({"type": "string", "minLength": upper, "maxLength": lower}), num),
        (
            "contradictory schema",
            lambda: JsonSchema({"type": "number", "exclusiveMinimum": number, "exclusiveMaximum": number}),
            num,
        ),
        ("schema not understood", lambda: JsonSchema({"type": "object", "required": [word]}), num),
        ("schema not understood", lambda: JsonSchema({"type": "integer", "multipleOf": lower}), num),
        ("schema not understood", lambda: JsonSchema({"$ref": f"#/$defs/{word}"}), num),
        ("schema not understood", lambda: JsonSchema({"type": "array", "items": {"$ref": "#"}}), num),
        ("no such text", lambda: Regex(f"{word}[^\\s\\S]"), num),
        ("no such text", lambda: Choices(["\ud800" + word]), num),
        ("not valid", lambda: Regex(f"({word}"), num),
        ("not valid", lambda: Regex(f"(?={word})"), num),
        ("not valid", lambda: Choices([]), num),
        ("not valid", lambda: Characters(upper, lower), num),
        ("too large", lambda: Regex(f"(a|b)*a(a|b){{{13 + lower}}}"), num),
        ("too large", lambda: Regex(f".{{1,{2000 + lower}}}"), num),
        ("too large", lambda: Choices([word * 1000] * 300), num),
        ("too large", lambda: Words([random_text(rng, 5, 8) for _ in range(16)]), num),
    ]
    return rng.choice(cases)


def canvas_of(problem: Problem, name: str, lm: LanguageModel, rng: random.Random) -> tuple[str, str] | None:
    """The text before the hole, and the whole text with it; None if the hole would be too large."""
    assert lm.tokenizer is not None
    space = rng.choice(["", " "])
    known = problem.witness if not (space and lm.tokenizer.joins_spaces) else space + problem.witness
    num = len(lm.tokenizer.encode(known))
    return (BEFORE + space, f"{BEFORE}{space}[MASK*{num}:{name}]{AFTER}") if num <= MAX_TOKENS else None


def fill(
    lm: LanguageModel, texts: list[str], constraints: dict[str, Constraint], seed: int, steps: int
) -> list[str | UserError]:
    """The filled texts; of a batch that is refused, each text on its own."""
    blocks = lm.config.model.block_length > 0
    samplers = BLOCK_SAMPLERS if blocks else SAMPLERS
    options: dict[str, Any] = OPTIONS[seed % len(OPTIONS)] | {"sampler": samplers[seed % len(samplers)], "steps": steps}
    if blocks:
        options["candidates"] = 1
    try:
        return [*lm.fill(texts, seed=seed, constraints=constraints, **options)]
    except UserError as error:
        if len(texts) == 1:
            return [error]
    return [
        fill(lm, [text], {name: constraint}, seed, steps)[0]
        for text, (name, constraint) in zip(texts, constraints.items(), strict=True)
    ]


def check_feasible(lm: LanguageModel, num: int, seed: int, batch: int, steps: int) -> tuple[Counter[str], list[str]]:
    rng, num_satisfied, failures = random.Random(seed), Counter[str](), []
    made: list[tuple[Problem, str, str]] = []
    while len(made) < num:
        problem = FEASIBLE[len(made) % len(FEASIBLE)](rng)
        assert problem.is_satisfied(problem.witness), problem
        if (canvas := canvas_of(problem, f"x{len(made) % batch}", lm, rng)) is not None:
            made.append((problem, *canvas))
    for first in range(0, num, batch):
        some = made[first : first + batch]
        constraints = {f"x{number}": problem.constraint for number, (problem, _, _) in enumerate(some)}
        filled = fill(lm, [text for _, _, text in some], constraints, first // batch, steps)
        for (problem, before, canvas), text in zip(some, filled, strict=True):
            if isinstance(text, str) and text.startswith(before) and text.endswith(AFTER):
                try:
                    is_satisfied = problem.is_satisfied(text[len(before) : -len(AFTER)])
                except ValueError:  # not JSON
                    is_satisfied = False
                if is_satisfied:
                    num_satisfied[problem.kind] += 1
                    continue
            failures.append(f"{problem.kind}: {problem.constraint!r} in {canvas!r}, like {problem.witness!r}: {text!r}")
    return num_satisfied, failures


def check_infeasible(lm: LanguageModel, num: int, seed: int) -> tuple[Counter[str], list[str], float]:
    """How many problems are refused, by kind, those that are not, and the longest time that one takes."""
    assert lm.tokenizer is not None
    rng, num_refused, failures, slowest = random.Random(seed + 1), Counter[str](), [], 0.0
    longest = max(len(lm.tokenizer.piece(index)) for index in range(lm.tokenizer.vocabulary.size - 1))
    for _ in range(num):
        kind, make, num_tokens = infeasible_problem(rng, longest)
        start = time.perf_counter()
        try:
            constraint = make()
            filled = lm.fill(f"{BEFORE} [MASK*{num_tokens}:x]{AFTER}", steps=2, constraints={"x": constraint})
            failures.append(f"{kind}: {constraint!r} with {num_tokens} tokens: {filled!r}")
        except UserError as error:
            if "\n" in str(error):
                failures.append(f"{kind}: {error!r} has several lines")
            num_refused[kind] += 1
        slowest = max(slowest, time.perf_counter() - start)
    return num_refused, failures, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="box")
    parser.add_argument("--num", type=int, default=1000, help="feasible problems")
    parser.add_argument("--infeasible", type=int, default=200, help="infeasible problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=20, help="problems per batch")
    parser.add_argument("--steps", type=int, default=4, help="sampling steps")
    arguments = parser.parse_args()
    lm, commit, start = adlm.load(arguments.model), adlm.code_commit(), time.perf_counter()
    satisfied, failures = check_feasible(lm, arguments.num, arguments.seed, arguments.batch, arguments.steps)
    middle = time.perf_counter()
    refused, more, slowest = check_infeasible(lm, arguments.infeasible, arguments.seed)
    for failure in (*failures, *more):
        print(failure)
    report = {
        "model": arguments.model,
        "commit": commit,
        "seed": arguments.seed,
        "feasible": arguments.num,
        "satisfied": sum(satisfied.values()),
        "satisfied_by_kind": dict(sorted(satisfied.items())),
        "infeasible": arguments.infeasible,
        "refused": sum(refused.values()),
        "refused_by_kind": dict(sorted(refused.items())),
        "slowest_refusal_seconds": round(slowest, 2),
        "seconds": {"feasible": round(middle - start), "infeasible": round(time.perf_counter() - middle)},
        "failures": len(failures) + len(more),
    }
    print(json.dumps(report, indent=2))
    return int(bool(failures or more))


if __name__ == "__main__":
    sys.exit(main())
