"""Hostile constraints are compiled or refused within seconds and bounded memory, each in a process of its own.

python tests/constraints/test_limits.py [TOKENIZER]    # prints what each takes, by default with the box's tokenizer
"""

import json
import random
import string
import subprocess
import sys

import pytest

from adlm import AllOf, Characters, Choices, JsonSchema, Regex, Words
from adlm.constraints.automaton import token_automaton
from adlm.errors import UserError
from adlm.tokens import load_tokenizer

MAX_SECONDS, MAX_MEBIBYTES = 5, 800


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(depth):
    parts = {
        f"a{n}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/a{n + 1}"} for name in "abc"}}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": parts | {f"a{depth}": {"type": "null"}}}


def random_words(num, length):
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_lowercase, k=length)) for _ in range(num)]


HOSTILE = {
    "catastrophic for backtracking": lambda: Regex("(a+)+$"),
    "20,000 characters": lambda: Regex(".{1,20000}"),
    "2^20 states": lambda: Regex("(a|b)*a(a|b){20}"),
    "2^13 states": lambda: Regex("(a|b)*a(a|b){12}"),
    "nested repetitions": lambda: Regex("((((a{1,9}){1,9}){1,9}){1,9}){1,9}"),
    "repeated optional repetitions": lambda: Regex("((a?){100}){100}"),
    "many rounds of minimisation": lambda: Regex("a{5000}b|[ac]{0,4000}"),
    "coprime periods": lambda: AllOf([Regex(f"((a|b){{{num}}})*") for num in (7, 11, 13, 17, 19)]),
    "1,000 Unicode characters": lambda: Characters(3, 1000),
    "10^6 Unicode characters": lambda: Characters(3, 10**6),
    "1 MB of choices": lambda: Choices(["x" * 1000] * 1000),
    "200,000 characters that merge": lambda: Choices([f"item {number:05}" for number in range(18_000)]),
    "200,000 characters that do not": lambda: Choices(random_words(10_000, 20)),
    "10,000 enum values": lambda: JsonSchema({"enum": [f"value {number}" for number in range(10_000)]}),
    "10,000 random enum values": lambda: JsonSchema({"enum": random_words(10_000, 3)}),
    "a recursive schema": lambda: JsonSchema({"$ref": "#"}),
    "a schema 200 deep": lambda: JsonSchema(nested(200)),
    "a schema 60 deep": lambda: JsonSchema(nested(60)),
    "references that double": lambda: JsonSchema(doubling(40)),
    "references that double less": lambda: JsonSchema(doubling(6)),
    "500 optional properties": lambda: JsonSchema(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}
    ),
    "strings of 500 characters": lambda: JsonSchema({"type": "string", "maxLength": 500}),
    "200 strings with patterns": lambda: JsonSchema(
        {
            "type": "object",
            "properties": {
                f"p{number}": {"type": "string", "pattern": f"(a|b)*a(a|b){{8}}c{number}", "maxLength": 90}
                for number in range(200)
            },
        }
    ),
    "32 expressions at once": lambda: AllOf([Regex(f"((a|b){{{num}}}|a*)*") for num in range(2, 34)]),
    "32 long expressions at once": lambda: AllOf([Regex(f"a{{{num}}}") for num in range(9000, 9032)]),
    "12 words in any order": lambda: Words(random_words(12, 8)),
    "1,000 forbidden words": lambda: Words(forbidden=random_words(1000, 8)),
}
LIGHT = ("2^20 states", "1 MB of choices", "10,000 enum values")


def measure(name, tokenizer_name="box"):
    """Seconds of this process, and by how much its peak memory grows, while a constraint is compiled or refused."""
    import resource
    import time

    tokenizer = load_tokenizer(tokenizer_name)
    token_automaton("a", tokenizer)  # what is done once for a tokenizer
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        result = f"{len(token_automaton(HOSTILE[name](), tokenizer).final)} states"
    except UserError as error:
        result = str(error)
    seconds = time.process_time() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return {"name": name, "seconds": round(seconds, 2), "mebibytes": round(growth), "result": result}


def measured(name, tokenizer_name="box"):
    call = f"runpy.run_path({__file__!r})['measure']({name!r}, {tokenizer_name!r})"
    code = f"import json, runpy; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def assert_bounded(name):
    found = measured(name)
    assert found["seconds"] < MAX_SECONDS, found
    assert found["mebibytes"] < MAX_MEBIBYTES, found
    assert "\n" not in found["result"], found
    assert len(found["result"]) < 250, found


@pytest.mark.parametrize("name", LIGHT)
def test_a_hostile_constraint_is_compiled_or_refused_within_limits(name):
    assert_bounded(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in LIGHT])
def test_more_hostile_constraints_are_compiled_or_refused_within_limits(name):
    assert_bounded(name)


if __name__ == "__main__":
    for hostile in HOSTILE:
        sys.stdout.write(json.dumps(measured(hostile, *sys.argv[1:2])) + "\n")
