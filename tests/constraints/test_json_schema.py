"""JSON schemas: every accepted text is JSON that `jsonschema` validates, and plain JSON of valid values is accepted."""

import datetime
import json
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm import JsonSchema
from adlm.constraints.byte_automata import DEAD
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["é", 1, None, '"']}, "minItems": 1, "maxItems": 3},
        "size": {"$ref": "#/$defs/size"},
        "other": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"const": {"a": [1]}}}}]},
    },
    "required": ["name", "size"],
    "$defs": {"size": {"type": ["number", "null"], "description": "in metres"}},
    "additionalProperties": False,
}

# what pydantic 2 writes for a model with an enum, an optional field, a nested model, bounds and a tuple
PYDANTIC = {
    "$defs": {
        "Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"},
        "Point": {
            "additionalProperties": False,
            "properties": {
                "x": {"maximum": 1.0, "minimum": -1.0, "title": "X", "type": "number"},
                "y": {"exclusiveMinimum": 0, "maximum": 20, "title": "Y", "type": "integer"},
            },
            "required": ["x", "y"],
            "title": "Point",
            "type": "object",
        },
    },
    "properties": {
        "colour": {"$ref": "#/$defs/Colour", "description": "of the thing"},
        "kind": {"const": "thing", "default": "thing", "title": "Kind", "type": "string"},
        "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
        "pair": {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
            "title": "Pair",
            "type": "array",
        },
        "code": {"pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 6, "title": "Code", "type": "string"},
        "id": {"format": "uuid", "title": "Id", "type": "string"},
        "old": {"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"},
    },
    "required": ["colour", "where", "id"],
    "title": "Thing",
    "type": "object",
}


def accepts(schema, text):
    automaton, state = byte_automaton(JsonSchema(schema)), 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state == DEAD:
            return False
    return bool(automaton.final[state])


def random_text(schema, rng):
    """A random text that a schema accepts: a walk that ends at a final state, or later."""
    automaton, state, data = byte_automaton(JsonSchema(schema)), 0, bytearray()
    while not (automaton.final[state] and (rng.random() < 0.3 or not (automaton.next[state] >= 0).any())):
        targets = automaton.next[state]
        letters = np.flatnonzero(targets >= 0)
        letters = letters[letters < 128] if (letters < 128).any() else letters
        target = rng.choice(sorted(set(targets[letters].tolist())))  # a state first: else all letters are in strings
        byte = rng.choice([each for each in letters.tolist() if targets[each] == target])
        state = target
        data.append(byte)
    return data.decode()


def validate(text, schema):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)


@pytest.mark.parametrize(
    "schema",
    [
        RECORD,
        PYDANTIC,
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 0}},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        {"type": "object", "properties": {name: {"type": "null"} for name in "abc"}},
        {"type": "object"},
        {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3},
        {"type": "number", "exclusiveMinimum": 1e9, "maximum": 1e12},
        {"type": "integer", "minimum": -12, "maximum": 345},
        {"type": "string", "pattern": "a|é", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "[^a]\\W$"},
        {"type": ["string", "null"], "pattern": "^x*y?"},
        *({"type": "string", "format": name} for name in ("date", "time", "date-time", "email", "uuid", "ipv4")),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_every_text_of_a_schema_is_json_that_it_allows(schema):
    rng = random.Random(0)
    texts = {random_text(schema, rng) for _ in range(60)}
    for text in texts:
        validate(text, schema)
    assert len(texts) > 1 or schema == {"type": "object"}


def test_plain_json_of_a_schema_is_one_of_its_texts():
    for value in (
        {"name": "Ann", "size": 1.5},
        {"name": 'a"\\é', "age": -3, "tags": ["é", None], "size": None, "other": True},
        {"name": "x", "size": 1e30, "other": {}},
    ):
        for separators in ((", ", ": "), (",", ":")):
            assert accepts(RECORD, json.dumps(value, ensure_ascii=False, separators=separators))
    for text in ('{"size": 1, "name": "x"}', '{"name": "", "size": 1}', '{"name": "x", "size": 01}', "{}"):
        assert not accepts(RECORD, text), text
    identity = "12345678-90ab-cdef-1234-567890abcdef"
    for where in (None, {"x": -0.5, "y": 20}):
        assert accepts(PYDANTIC, json.dumps({"colour": "red", "where": where, "pair": [1, True], "id": identity}))
    for wrong in ({"x": -1.5, "y": 20}, {"x": 0, "y": 0}, {"x": 0}):
        assert not accepts(PYDANTIC, json.dumps({"colour": "red", "where": wrong, "id": identity}))


BOUND = st.one_of(st.integers(-1200, 1200), st.integers(-1200, 1200).map(lambda number: number / 100))
KEYWORDS = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(KEYWORDS, BOUND, min_size=1, max_size=2), st.integers(-1300, 1300), st.sampled_from([1, 10, 100])
)
def test_a_number_is_accepted_exactly_if_it_is_within_its_bounds(bounds, number, divisor):
    value = number if divisor == 1 else number / divisor
    bounds = {keyword: min(bound, 100, key=abs) for keyword, bound in bounds.items()}
    for tried in (value, *bounds.values(), *(bound + 1 for bound in bounds.values()), *(-b for b in bounds.values())):
        for name in ("integer", "number"):
            text, schema = f"{tried:.2f}".rstrip("0").rstrip("."), {"type": name} | bounds
            if text == "-0":
                continue
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
            assert accepts(schema, text) == is_valid, (schema, text)


def test_small_integers_are_counted():
    """All numbers of at most three digits, against each pair of bounds."""
    for least, most in ((-105, 99), (0, 0), (7, 120), (-120, -7), (-10, 0), (5, 4)):
        schema = {"type": "integer", "minimum": least, "maximum": most}
        found = [number for number in range(-999, 1000) if accepts(schema, str(number))]
        assert found == [*range(least, most + 1)]
        assert not any(accepts(schema, text) for text in ("007", "+7", "7.0", "1e1", "--7", ""))


def test_a_decimal_that_rounds_to_an_exclusive_bound_is_not_accepted():
    for bound, texts in ((0.3, ["0.30000000000000001"]), (1e15, ["999999999999999.999999", "1000000000000000"])):
        schema = {"type": "number", "exclusiveMaximum": bound}
        assert not any(accepts(schema, text) for text in texts)
        assert accepts(schema, "0")


def test_dates_are_those_of_the_calendar():
    schema, days = {"type": "string", "format": "date"}, set()
    for year in (1, 4, 1900, 1999, 2000, 2024, 9999):
        first = datetime.date(year, 1, 1)
        days |= {(first + datetime.timedelta(day)).isoformat() for day in range(365)} | {f"{year:04}-12-31"}
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts(schema, f'"{text}"') == (text in days)
    assert not accepts(schema, '"0000-01-01"')
    for text, is_time in (("23:59:59Z", True), ("24:00:00Z", False), ("12:30:00.25+01:30", True), ("12:30:00", False)):
        assert accepts({"type": "string", "format": "time"}, f'"{text}"') == is_time
        assert accepts({"type": "string", "format": "date-time"}, f'"2024-02-29T{text}"') == is_time


def test_a_pattern_is_searched_as_json_schema_says():
    for pattern in ("a", "^a", "a$", "^a$", "^a|b", "é+", "[^a]", r"\d\D", ""):
        schema = {"type": "string", "pattern": pattern}
        for text in ("a", "b", "ab", "ba", "1x", "éa", "", "xx"):
            if pattern == "^a|b":
                continue  # ^ inside
            is_ascii_or_allowed = text.isascii() or not re.search(r"\\[DWS]", pattern)
            assert accepts(schema, f'"{text}"') == (re.search(pattern, text) is not None and is_ascii_or_allowed)
    assert not accepts({"type": "string", "pattern": "a"}, r'"a\\"')  # no escapes beside a pattern
    with pytest.raises(UserError, match=r"uses \^, \$ or \\b inside"):
        accepts({"type": "string", "pattern": "^a|b"}, "")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "minimum": 3}, "has 'minimum' beside type"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "has 'uniqueItems' beside type"),
        ({"type": "integer", "multipleOf": 2}, "has 'multipleOf' beside type"),
        ({"oneOf": [{"type": "null"}]}, "needs type, enum, const, anyOf or"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "has 'type' beside anyOf"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf of the JSON schema has several parts"),
        ({"enum": [1], "type": "string"}, "enum of the JSON schema has no value of type 'string'"),
        ({"const": True, "type": "integer"}, "const of the JSON schema has no value of type 'integer'"),
        ({"type": "text"}, "has type 'text'; use string, array, object"),
        ({"type": []}, r"has type \[\]"),
        ({}, "needs type, enum, const, anyOf or"),
        ({"type": "array"}, "needs items"),
        ({"type": "array", "items": True}, "is True, and must be an object"),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "prefixItems of the JSON schema has 1 parts; give min"),
        ({"type": "object", "required": ["a"]}, "requires 'a', which is not in its properties"),
        ({"type": "object", "additionalProperties": {"type": "null"}}, "has additionalProperties only"),
        ({"type": "string", "maxLength": -1}, "maxLength of the JSON schema is -1"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength 3 above maxLength 1"),
        ({"type": "string", "pattern": "(a"}, "regular expression .* is not valid"),
        ({"type": "string", "pattern": 3}, "pattern of the JSON schema is 3"),
        ({"type": "string", "format": "uri"}, "format of the JSON schema is 'uri'; use date, time"),
        ({"type": "integer", "minimum": "3"}, "minimum of the JSON schema is '3', and must be a number"),
        ({"type": "integer", "maximum": 10**18}, "has more than 18 digits"),
        ({"$ref": "#/$defs/none"}, r"has no part '#/\$defs/none'"),
        ({"$ref": "#"}, "is recursive"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "is recursive"),
        ({"anyOf": []}, "must be a list of at least one"),
    ],
)
def test_a_schema_that_is_not_understood_is_refused(schema, message):
    with pytest.raises(UserError, match=message) as caught:
        byte_automaton(JsonSchema(schema))
    assert len(str(caught.value)) < 250


def test_optional_properties_take_linear_space():
    names = [f"p{number}" for number in range(60)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    assert len(byte_automaton(JsonSchema(schema)).final) < 60 * 20
    for chosen in (names[::7], names[3:4], [], names):
        assert accepts(schema, json.dumps(dict.fromkeys(chosen, True)))
    assert not accepts(schema, '{"p3": true, "p2": true}')
    assert not accepts(schema, '{"p3": true,}')


def test_arrays_in_arrays_take_linear_space():
    schema = {"type": "integer"}
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    assert len(byte_automaton(JsonSchema(schema)).final) < 20 * 6
    assert accepts(schema, "[" * 20 + "1, 2" + "]" * 19 + ", []]")
    assert not accepts(schema, "[" * 20 + "]" * 19)


@pytest.mark.parametrize(("least", "most"), [(0, None), (1, None), (3, None), (0, 1), (0, 2), (2, 3), (2, 2), (0, 0)])
def test_arrays_have_as_many_items_as_the_schema_says(least, most):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": least}
    schema |= {} if most is None else {"maxItems": most}
    found = [num for num in range(7) if accepts(schema, json.dumps([*range(num)]))]
    assert found == [num for num in range(7) if num >= least and (most is None or num <= most)]
    assert not any(accepts(schema, text) for text in ("[,]", "[1,]", "[,1]", "[1 2]", "[1,2,]", "["))
