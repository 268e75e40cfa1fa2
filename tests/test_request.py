"""Requests: one record gives a command's parser, help, checks, JSON schema and provenance."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from adlm.cli.main import COMMANDS, Parser, add_options, main, request_of
from adlm.errors import UserError
from adlm.request import Request, json_schema, narrow, option, options_of, to_json


@dataclass(frozen=True)
class Baking(Request):
    """Bake bread."""

    flour: Literal["rye", "wheat"] = option("kind of flour", "rye")
    loaves: int = option("loaves", positional=True, minimum=1, maximum=9, remedy="the oven is small", metavar="N")
    oven_heat: float | None = option("100% by default", None, minimum=0)
    seeds: tuple[Literal["poppy", "sesame"], ...] = option("on top", (), commas=True)
    size: tuple[int, int] | None = option("of a loaf", None, metavar=("W", "H"))
    note: tuple[str, ...] = option("to the baker", (), repeated=True)
    out: Path = option("where it goes", Path("shelf"))
    minutes: float = option("in the oven", 40.0)
    crust: bool | None = option("whether it has one", None)
    quiet: bool = option("print nothing", False)


def parsed(*words):
    parser = Parser(prog="adlm bake")
    add_options(parser, Baking)
    return request_of(parser.parse_args(words), words)


def test_words_become_a_record():
    words = "3 --flour wheat --oven-heat 200 --seeds poppy,sesame --size 10 20 --note a --note b --no-crust --quiet"
    assert parsed(*words.split()) == Baking(
        loaves=3, flour="wheat", oven_heat=200.0, seeds=("poppy", "sesame"), size=(10, 20), note=("a", "b"),
        crust=False, quiet=True,
    )  # fmt: skip
    assert parsed("1") == Baking(loaves=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0"], "N 0 must be at least 1; the oven is small"),
        (["10"], "N 10 must be at most 9; the oven is small"),
        (["1", "--oven-heat", "-1"], "--oven-heat -1.0 must be 0 or more"),
        (["1", "--oven-heat", "nan"], "--oven-heat nan must be 0 or more"),
        (["1", "--flour", "ryee"], "--flour 'ryee' is not one of rye, wheat; did you mean 'rye'?"),
        (["1", "--seeds", "poppy,salt"], "--seeds 'salt' is not one of poppy, sesame"),
        ([], "the following arguments are required: N (see adlm bake --help)"),
        (["x"], "argument N: invalid int value: 'x' (see adlm bake --help)"),
    ],
)
def test_errors_name_the_option_as_it_is_written(words, message):
    with pytest.raises(UserError) as error:
        parsed(*words)
    assert str(error.value) == message


def test_an_error_names_a_positional_argument_with_choices():
    @dataclass(frozen=True)
    class Slicing(Request):
        knife: Literal["long", "short"] = option("the knife", positional=True)

    with pytest.raises(UserError, match=r"^KNIFE 'blunt' is not one of long, short$"):
        Slicing(knife="blunt")


def test_a_record_made_in_python_is_checked_too():
    with pytest.raises(UserError, match="N 0 must be at least 1") as error:
        Baking(loaves=0)
    assert error.value.option == "loaves"


def test_the_help_names_defaults_and_choices():
    parser = Parser(prog="adlm bake")
    add_options(parser, Baking)
    text = parser.format_help()
    for part in (
        "--flour {rye,wheat}",
        "kind of flour (default: rye)",
        "(default: shelf)",
        "(default: 40)",
        "--no-crust",
        "100% by",
    ):
        assert part in text
    assert "default: False" not in text


def test_the_schema_has_types_bounds_choices_and_defaults():
    schema = json_schema(Baking)
    assert schema["description"] == "Bake bread."
    assert schema["required"] == ["loaves"]
    properties = schema["properties"]
    assert properties["loaves"] == {"description": "loaves", "minimum": 1, "maximum": 9, "type": "integer"}
    assert properties["flour"]["enum"] == ["rye", "wheat"]
    assert properties["size"]["items"] == {"type": "integer"}
    assert (properties["size"]["minItems"], properties["size"]["maxItems"]) == (2, 2)
    assert properties["out"]["default"] == "shelf"
    assert json.loads(json.dumps(schema)) == schema


def test_a_record_is_json_for_provenance():
    assert to_json(Baking(loaves=1, size=(1, 2)))["size"] == [1, 2]
    assert to_json(Baking(loaves=1))["out"] == "shelf"


def test_a_record_is_narrowed_to_another_with_fields_of_the_same_names():
    @dataclass(frozen=True)
    class Oven:
        oven_heat: float
        size: object = None
        door: str = "closed"

    assert narrow(Baking(loaves=1, oven_heat=5.0, size=(1, 2)), Oven) == Oven(5.0, (1, 2))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_the_schema_of_its_request(command, capsys):
    assert main([command, "--help", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for each in [schema] if "properties" in schema else schema.values():
        assert all(option["description"] for option in each["properties"].values())
    if command == "bench":
        assert main(["bench", "train", "--help", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == schema["train"]


def test_fields_that_are_no_options_are_left_out():
    @dataclass(frozen=True)
    class WithCache(Request):
        cache: int = 0
        batch: int = option("rows", 1)

    assert [each.name for each in options_of(WithCache)] == ["batch"]


def test_the_help_of_adlm_itself_is_text_with_json_too(capsys):
    with pytest.raises(SystemExit):
        main(["--help", "--json"])
    assert capsys.readouterr().out.startswith("usage: adlm COMMAND")
