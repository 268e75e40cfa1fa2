"""Requests with constraints: their fields in the API of OpenAI and of vLLM, batches, streams, hostile ones."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jsonschema
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")
openai = pytest.importorskip("openai", reason="openai is not installed; pip install 'adlm[dev]'")

from running_server import PATIENCE, get, post, running, wait_until  # noqa: E402
from small_models import mostly_slow  # noqa: E402

import adlm  # noqa: E402
from adlm.apps.server import app, constraints  # noqa: E402
from adlm.apps.server.app import ServerSettings  # noqa: E402
from adlm.apps.server.completion import Limits  # noqa: E402
from adlm.apps.server.constraints import any_object  # noqa: E402
from adlm.constraints.automaton import token_automaton  # noqa: E402

DAY = r"[12]\d{3}-(0[1-9]|1[0-2])-[0-3]\d"
WORDS = ["yes", "never", "of course, my lord"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "old": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}


def is_day(text):
    return re.fullmatch(DAY, text) is not None


def is_word(text):
    return text in WORDS


def is_person(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text):
    return isinstance(json.loads(text), dict)


FIELDS = [
    ({"guided_regex": DAY}, is_day),
    ({"guided_choice": WORDS}, is_word),
    ({"guided_json": SCHEMA}, is_person),
    ({"structured_outputs": {"regex": DAY}}, is_day),
    ({"structured_outputs": {"choice": WORDS}}, is_word),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_person),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_person),
    ({"response_format": {"type": "json_object"}}, is_object),
]


@pytest.fixture(scope="module")
def served(models, infilling):
    return {"adlm": models["adlm"], "ar": models["ar"], "box": adlm.load(), "infilling": infilling}


@pytest.fixture(scope="module")
def address(served):
    with running(served, ServerSettings(batch=4, limits=Limits(rows=24, body_bytes=1 << 21))) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


def complete(address, **body):
    return post(f"{address}/v1/completions", json={"model": "adlm", "steps": 3, **body})


@pytest.mark.parametrize(
    ("fields", "is_satisfied"), FIELDS, ids=lambda value: value.__name__ if callable(value) else str(value)[:40]
)
def test_the_openai_client_gets_a_completion_that_satisfies_its_constraint(client, fields, is_satisfied):
    named = {"model": "box", "max_tokens": 10, "extra_body": {"steps": 4, **fields}}
    done = client.completions.create(prompt="It was on", seed=1, n=2, **named)
    assert all(is_satisfied(choice.text) for choice in done.choices), done.choices
    assert {choice.finish_reason for choice in done.choices} == {"stop"}
    between = client.completions.create(prompt="He said ", suffix=" to the king.", seed=2, **named)
    assert all(is_satisfied(choice.text) for choice in between.choices), between.choices


def test_named_holes_of_prompts_have_constraints_of_their_own(address, served):
    prompts = ["On [MASK*10:day] he said [MASK*4:word]. [MASK*2]", "[MASK*10:day]!"]
    given = {"day": {"regex": DAY}, "word": {"choice": WORDS}}
    answer = complete(address, model="box", prompt=prompts, n=2, seed=3, constraints=given).json()
    found = {"day": adlm.Regex(DAY), "word": adlm.Choices(WORDS)}
    texts = served["box"].with_fixed_batch(4).fill(prompts, num=2, seed=3, steps=3, constraints=found)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length", "stop", "stop"]
    assert all(re.fullmatch(rf"{DAY}!", text) for text in texts[2:])


@pytest.mark.parametrize("fields", [{"guided_regex": "[a-z]{3,12}"}, {"response_format": {"type": "json_object"}}])
def test_a_stream_has_the_text_and_ends_with_stop(address, fields):
    body = {"prompt": "It was", "max_tokens": 12, "seed": 5, "n": 3, "sampler": "ancestral", "steps": 40, **fields}
    whole = complete(address, **body).json()["choices"]
    lines = complete(address, **body, stream=True).text.split("\n\n")
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["stop"]
    assert len(pieces) > 3, "text comes in parts"


@pytest.mark.parametrize("num", mostly_slow([16, 64], 16))
def test_clients_with_and_without_constraints_get_what_each_gets_alone(address, num):
    kinds = [
        (
            {"prompt": "Text[MASK*6:x]", "constraints": {"x": {"regex": "[a-z]*o"}}},
            re.compile("Text[a-z]{5}o").fullmatch,
        ),
        ({"prompt": "Text[MASK*6:x]"}, lambda text: len(text) >= 4),
        (
            {"prompt": "[MASK*6:x].", "constraints": {"x": {"choice": ["London", "Oxford"]}}},
            ["London.", "Oxford."].count,
        ),
        (
            {"prompt": "List: ", "max_tokens": 3, "guided_json": {"type": "array", "items": {"type": "null"}}},
            "[]".__eq__,
        ),
    ]
    options = [{}, {"sampler": "remdm-cap"}, {"top_p": 0.8, "temperature": 0.9}, {"sampler": "confidence"}]
    requests = [
        {"seed": number, "logprobs": 0, **options[number // 4 % 4], **kinds[number % 4][0]} for number in range(num)
    ]
    with ThreadPoolExecutor(num) as pool:
        together = [answer.json()["choices"] for answer in pool.map(lambda body: complete(address, **body), requests)]
    for number, (body, choices) in enumerate(zip(requests, together, strict=True)):
        assert kinds[number % 4][1](choices[0]["text"]), (body, choices)
        assert complete(address, **body).json()["choices"] == choices
    assert len({choices[0]["text"] for choices in together}) > num // 3


@pytest.mark.parametrize("sampler", mostly_slow(["speculative", "remdm-cap"], "speculative"))
def test_holes_of_a_block_causal_model_have_constraints_and_end_by_themselves(address, sampler):
    free = {
        "model": "infilling",
        "prompt": "(A",
        "suffix": "B)",
        "max_tokens": 9,
        "seed": 4,
        "n": 3,
        "sampler": sampler,
    }
    held = free | {"guided_regex": "(ab|cd)[a-f]*"}
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda body: complete(address, **body).json(), [free, held] * 2)
        together = [answer["choices"] for answer in answers]
    assert together == [complete(address, **body).json()["choices"] for body in [free, held]] * 2
    assert all(re.fullmatch("(ab|cd)[a-f]*", choice["text"]) for choice in together[1])
    assert {choice["finish_reason"] for choice in together[1]} == {"stop"}


def test_any_json_object_is_allowed_up_to_a_depth_and_nothing_else():
    pattern = re.compile(any_object().pattern)
    for text in ("{}", '{"a": 1}', '{"a":"\\"b", "": [1, -2.5e3, null], "c": {"d": [true]}}', '{"é": [{}]}'):
        assert pattern.fullmatch(text), text
        assert is_object(text)
    for text in (
        "[]",
        "1",
        '{"a"}',
        '{"a": 01}',
        "{a: 1}",
        '{"a": 1,}',
        '{"a": [[[1]]]}',
        '{"a": {"b": {"c": {}}}}',
        "{ }",
    ):
        assert not pattern.fullmatch(text), text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice are two"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs.regex are two constraints on one text; leave one out",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "choice": ["a"]}},
            "structured_outputs",
            "structured_outputs.json and structured_outputs.choice are two",
        ),
        (
            {"guided_regex": "a", "constraints": {"x": {"regex": "a"}}},
            "constraints",
            "guided_regex and constraints are two constraints",
        ),
        (
            {"constraints": {"x": {"regex": "a", "choice": ["a"]}}},
            "constraints",
            "constraints.x.regex and constraints",
        ),
        ({"constraints": {"x": {}}}, "constraints", "constraints.x is empty; give it json, regex or choice"),
        ({"constraints": {"x": {"regex": "a"}}}, "constraints", "constraints names 'x', and no hole has this name"),
        ({"constraints": {"a b": {"regex": "a"}}}, "constraints", "constraints must be an object with the names"),
        ({"constraints": {"x": {"regx": "a"}}}, "constraints", "constraints.x.regx is not a field of this request"),
        ({"prompt": "[MASK:x]", "guided_regex": "a"}, "guided_regex", "this prompt has holes; name them"),
        ({"guided_regex": "(a"}, "guided_regex", "the regular expression '(a' is not valid"),
        ({"guided_regex": "a{99}"}, "guided_regex", "the constraint of the completion cannot be satisfied with"),
        ({"guided_choice": []}, "guided_choice", "must have at least one text"),
        ({"guided_regex": "a", "prompt": "x" * 70}, None, "prompt, suffix and completion have 71 tokens"),
        ({"guided_choice": [1]}, "guided_choice", "guided_choice must be a list of texts"),
        ({"guided_json": "{"}, "guided_json", "guided_json is a text that is no JSON; give the schema as an object"),
        ({"guided_json": "[]"}, "guided_json", "guided_json is the text of a list; give that of a JSON schema"),
        ({"guided_json": {"type": "null", "uniqueItems": True}}, "guided_json", "the JSON schema has 'uniqueItems'"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs is empty; give it json, regex, choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "structured_outputs.grammar is not a field"),
        ({"response_format": {"type": "json"}}, "response_format", 'response_format must be {"type": "text"}'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format has type json_schema; give"),
        ({"prompt": ["a"] * 17, "guided_regex": "a+"}, "prompt", "17 holes of unknown length are more than 16, each"),
        ({"constraint": {"x": {"regex": "a"}}}, "constraint", "did you mean 'constraints'?"),
    ],
    ids=str,
)
def test_a_wrong_constraint_is_answered_with_its_field_and_the_remedy(address, fields, param, message):
    answer = complete(address, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]


def nested(depth):
    return f'{{"type": "array", "items": {nested(depth - 1)}}}' if depth else '{"type": "null"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"guided_choice": ' + json.dumps(["word"] * 150_000), "guided_choice has more than 65,536 characters"),
        ('"guided_regex": "' + "a" * 1_000_000 + '"', "guided_regex has more than 65,536 characters"),
        ('"guided_regex": "' + "(" * 30_000 + '"', ""),
        ('"guided_regex": "' + "(" * 9_000 + ")" * 9_000 + '"', ""),
        ('"guided_regex": "(a{999}){999}"', ""),
        ('"guided_regex": "(?:){999999999}"', ""),
        ('"guided_regex": "[ab]*a[ab]{14}"', ""),
        ('"guided_json": ' + nested(900), "guided_json has more than 64 objects and lists inside each other"),
        ('"guided_json": ' + json.dumps(nested(900)), "guided_json has more than 64 objects and lists"),
        ('"guided_json": ' + '{"a":' * 100_000, "the body is not valid JSON"),
        ('"guided_json": {"enum": [' + "9" * 99 + "]}", "enum has more than 40 digits"),
        ('"guided_json": {"type": "string", "minLength": 999999999999999999999}', ""),
        (
            '"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, '
            '"$ref": "#/$defs/a"}',
            "",
        ),
        (
            '"guided_json": {"type": "object", "properties": '
            + json.dumps({f"p{number}": {"type": "null"} for number in range(300)})
            + "}",
            "the object with p0 has 300 fields; give at most 256",
        ),
    ],
    ids=lambda value: value[:40],
)
def test_a_hostile_constraint_is_refused_within_seconds(address, content, message):
    started = time.monotonic()
    body = f'{{"model": "adlm", "max_tokens": 9, {content}'
    answer = post(
        f"{address}/v1/completions",
        content=body if "JSON" in message else body + "}",
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert message or error["param"] == content.split('"')[1], "of the library, about the field"
    assert time.monotonic() - started < 20, "0.1 to 3 s on an idle machine"


def test_two_threads_that_compile_the_same_constraint_get_the_same_automaton(served):
    pattern, tokenizer = any_object().pattern, served["box"].tokenizer
    token_automaton.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: token_automaton(pattern, tokenizer), range(4)))
    assert all((each.target == found[0].target).all() and (each.tokens == found[0].tokens).all() for each in found)


def test_a_constraint_that_makes_every_step_slow_is_refused(address, monkeypatch):
    """The step of one row is one of all rows that share its network call."""
    monkeypatch.setattr(constraints, "MAX_TRANSITIONS", 5)
    body = {"prompt": "a[MASK*6:x]", "constraints": {"x": {"regex": "[a-z]*"}}}  # one class of tokens
    answer = complete(address, **body)
    assert answer.status_code == 400
    assert "hole x has 6 transitions in its 6 places, and at most 5 are" in answer.json()["error"]["message"]
    assert complete(address, **{**body, "model": "infilling"}).status_code == 200, "a block of 4 places at a time"


def test_other_requests_do_not_wait_for_constraints_that_are_compiled(served, monkeypatch):
    gate, num, plan = threading.Event(), [], app.plan_completion

    def slow_plan(lm, body, limits):
        if body.is_constrained:
            num.append(1)
            assert gate.wait(PATIENCE)
        return plan(lm, body, limits)

    monkeypatch.setattr(app, "plan_completion", slow_plan)
    monkeypatch.setattr(constraints, "MAX_WAITING", 3)
    with running({"adlm": served["adlm"]}, ServerSettings()) as address, ThreadPoolExecutor(9) as pool:
        send = partial(pool.submit, complete, address, max_tokens=4)
        constrained = [send(guided_regex=regex) for regex in ("a{4}", "b{4}", "c{4}", "d{4}")]
        wait_until(lambda: any(answer.done() for answer in constrained))
        [refused] = [answer.result() for answer in constrained if answer.done()]
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert [answer.result().status_code for answer in [send() for _ in range(4)]] == [200] * 4
        assert get(f"{address}/health").status_code == 200
        assert len(num) == 1, "one of each client at a time"
        gate.set()
        texts = [answer.result().json()["choices"][0]["text"] for answer in constrained if answer.result() != refused]
        assert len(texts) == 3
        assert {*texts} < {"aaaa", "bbbb", "cccc", "dddd"}


def test_models_say_whether_they_take_constraints(address):
    found = {model["id"]: model["structured_outputs"] for model in get(f"{address}/v1/models").json()["data"]}
    assert found == {"adlm": True, "ar": True, "box": True, "infilling": True}


@pytest.mark.parametrize("fields", [{}, {"suffix": "B)"}, {"guided_regex": "[a-f ]*"}], ids=str)
def test_a_completion_has_at_least_min_tokens(address, fields):
    body = {"model": "infilling", "prompt": "(A", "max_tokens": 9, "seed": 2, "n": 12, **fields}
    free, held = (
        [choice["text"] for choice in answer.json()["choices"]]
        for answer in (complete(address, **body), complete(address, **body, min_tokens=6))
    )
    assert min(map(len, free)) < 6 <= min(map(len, held))
    assert max(map(len, held)) <= 9
    for model in ("adlm", "ar"):
        given = {"model": model, "max_tokens": 9, "min_tokens": 7, "guided_regex": "[a-z]*"}
        whole = complete(address, prompt="a", **given).json()["choices"]
        assert 7 <= len(whole[0]["text"]) <= 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4; exchange them"),
        ({"min_tokens": 5, "prompt": "[MASK]"}, "min_tokens cannot be combined with a prompt that has holes"),
    ],
)
def test_a_wrong_min_tokens_is_refused(address, fields, message):
    answer = complete(address, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"min_tokens": 5, "max_tokens": 9}, "(?s:.{5,})"),
        ({"guided_regex": "[a-c]{2,4}"}, "[a-c]{2,4}"),
        ({"prompt": "[MASK*3:a] x", "constraints": {"a": {"regex": "[a-c]{3}"}}}, "[a-c]{3} x"),
    ],
    ids=str,
)
def test_a_constrained_text_without_a_prompt_begins_with_what_is_asked_for(address, fields, form):
    """Of a block-causal model, whose first mask would otherwise be bos."""
    for seed in range(3):
        answer = complete(address, model="infilling", seed=seed, **({"prompt": ""} | fields)).json()
        assert re.fullmatch(form, answer["choices"][0]["text"]), answer
