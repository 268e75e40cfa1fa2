"""`fill` with constraints, on the model in the box: they always hold, and infeasible ones never reach the network."""

import json
import random
import re
import string
from dataclasses import replace

import jsonschema
import pytest

import adlm
from adlm import Choices, JsonSchema, Regex
from adlm.config.schema import Sampling, Schedule, Time
from adlm.constraints.automaton import token_automaton
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.methods.inputs import check_constraints
from adlm.registry import SAMPLERS
from adlm.sampling.samplers import Sampler

OPTIONS = [{}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 1.4, "repetition_penalty": 1.3}]
DATE = Regex(r"[12]\d{3}-(?:0[1-9]|1[0-2])-[0-3]\d")


@pytest.fixture(scope="module")
def lm():
    return adlm.load()


def random_constraint(rng):
    """A constraint, and the test that its texts pass."""
    kind = rng.randrange(3)
    if kind == 0:
        words = ["".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(1, 12))) for _ in range(4)]
        return Choices(words), lambda text: text in words
    if kind == 1:
        letters = rng.choice(["[a-z]", r"\d", "(?:[A-Z][a-z]*)", "(?:the|of|and)", "[^ ]", "é"])
        pattern = f"^{letters}{rng.choice(['', '+', '{2,5}', '?'])}{rng.choice(['', ' ', '-', '!'])}{letters}*x?$"
        return Regex(pattern), lambda text: re.fullmatch(pattern, text, re.ASCII) is not None
    types = rng.choices(["string", "integer", "boolean", "number", "null"], k=rng.randint(1, 3))
    parts = {name: {"type": each} for name, each in zip("abc", types, strict=False)}
    schema = {"type": "object", "properties": parts, "required": rng.sample([*parts], k=rng.randint(0, len(parts)))}

    def is_valid(text):
        jsonschema.validate(json.loads(text), schema)
        return True

    return JsonSchema(schema), is_valid


def fill_random_problems(lm, num, seed):
    rng = random.Random(seed)
    names = [
        name
        for name in SAMPLERS
        if SAMPLERS[name].constrained and not SAMPLERS[name].block_causal and not SAMPLERS[name].rated
    ]
    for number in range(num):
        constraint, is_satisfied = random_constraint(rng)
        space = rng.choice(["", " "])
        lengths = token_automaton(constraint, lm.tokenizer, space).lengths(24)
        text = f"The old king said:{space}[MASK*{rng.choice(lengths)}:x], and [MASK*2] went."
        filled = lm.fill(
            text,
            seed=number,
            sampler=names[number % len(names)],
            steps=4,
            constraints={"x": constraint},
            **OPTIONS[number % len(OPTIONS)],
        )
        start = len("The old king said:" + space)
        matches = [end.start() for end in re.finditer(", and", filled)]
        assert filled.startswith("The old king said:" + space)
        assert any(_holds(is_satisfied, filled[start:end]) for end in matches), (text, constraint, filled)


def _holds(is_satisfied, text):
    try:
        return is_satisfied(text)
    except (ValueError, jsonschema.ValidationError):
        return False


def test_random_problems_are_all_satisfied(lm):
    fill_random_problems(lm, num=24, seed=0)


@pytest.mark.slow
def test_many_random_problems_are_all_satisfied(lm):
    fill_random_problems(lm, num=300, seed=1)


def test_two_holes_several_texts_and_samples(lm):
    texts = ["It was on [MASK*10:day] that he said [MASK*2:word].", "[MASK*3] said [MASK*1:word]: [MASK*10:day]"]
    constraints = {"day": DATE, "word": Choices(["yes", "no", "never"])}
    filled = lm.fill(texts, num=2, steps=5, constraints=constraints)
    for text in filled[:2]:
        assert re.fullmatch(rf"It was on {DATE.pattern} that he said (yes|no|never)\.", text)
    for text in filled[2:]:
        assert re.search(rf" said (yes|no|never): {DATE.pattern}$", text)
    alone = lm.with_fixed_batch(4)
    together = alone.fill(texts, num=2, steps=5, constraints=constraints)
    assert alone.fill(texts[0], num=2, steps=5, constraints=constraints) == together[:2]


def test_names_without_constraints_change_nothing(lm):
    assert lm.fill("The [MASK*3:x] of", steps=4) == lm.fill("The [MASK*3] of", steps=4)


@pytest.mark.parametrize(
    ("text", "constraints", "message"),
    [
        ("a [MASK*9:x]", {"x": Choices(["yes"])}, "hole x cannot be satisfied with 9 tokens; it can have 1 to 4"),
        ("a [MASK*9:x]", {"y": DATE}, r"constraints names 'y', and no hole has this name.*\[MASK\*12:y\]"),
        ("a [MASK*9:x]", {"x": "yes|no"}, "the constraint of hole x must be Choices, .* or AllOf, not a str"),
        ("a [MASK*9:x]", [DATE], "constraints must be a dict from names of holes to constraints, not a list"),
        ("a [MASK*9:x]", {"x": Regex("(a")}, "is not valid"),
        ("a [MASK*..2:x] [MASK*5..8:x]", {"x": Regex("a+")}, r"\[MASK\*..2:x\] and \[MASK\*5..8:x\] have one name"),
        ("a [MASK*900000..1000000:x]", {"x": Regex("a+")}, "hole x cannot be satisfied with 900000 to"),
        ("a [MASK*200:x]", {"x": Regex("a*")}, "a text that the model reads as a whole, and this one is 201 tokens"),
    ],
)
def test_a_constraint_that_cannot_hold_is_refused_before_any_network_call(lm, monkeypatch, text, constraints, message):
    monkeypatch.setattr(FrozenNetwork, "hidden", None)
    with pytest.raises(UserError, match=message):
        lm.fill(text, constraints=constraints, sampler="semi-autoregressive")


def test_a_sampler_that_ignores_constraints_is_refused(lm, monkeypatch):
    monkeypatch.setattr("adlm.methods.inputs.sampler_of", lambda sampling: Sampler(lambda run: iter(())))
    with pytest.raises(UserError, match=r"sampling.sampler confidence draws tokens without regard to constraints; use"):
        lm.fill("a [MASK*9:x]", constraints={"x": DATE}, sampler="confidence")


@pytest.mark.parametrize("method", ["sedd", "d3pm"])
def test_a_model_that_ignores_constraints_is_refused(method, tiny_config):
    steps = 10 if method == "d3pm" else 0
    config = replace(tiny_config, method=method, time=Time(steps=steps), schedule=Schedule(eps=1e-3))
    with pytest.raises(UserError, match=f"steps of method {method} are not draws from a product of beliefs"):
        check_constraints(method_of(config), Sampling())
