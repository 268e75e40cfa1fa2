"""Names and descriptions of the config options, and error messages for invalid ones. Independent of files."""

import ast
import dataclasses
import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache

from pydantic import ValidationError

from adlm.config.schema import Config
from adlm.registry import Registry


@cache
def sections() -> dict[str, type]:
    """The fields of Config that are dataclasses, such as `model` and `train`, with their types."""
    found = {}
    for name, hint in typing.get_type_hints(Config).items():
        for alternative in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if dataclasses.is_dataclass(alternative):
                found[name] = typing.cast(type, alternative)
    return found


@cache
def descriptions() -> dict[str, str]:
    """Every option by its dotted name, with its description: the docstring below the field in the schema."""
    return dict(_field_docstrings(Config, ""))


def _field_docstrings(owner: type, prefix: str) -> Iterator[tuple[str, str]]:
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(owner)).body[0]).body
    for statement, follower in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if owner is Config and name in sections():
            yield from _field_docstrings(sections()[name], f"{name}.")
        elif isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            yield f"{prefix}{name}", str(follower.value.value)


@cache
def string_options() -> set[str]:
    """The options of type str. Their values are not parsed as YAML, so that `data.path=*.txt` works."""
    owners = {"": Config, **sections()}
    return {
        f"{section}.{name}".removeprefix(".")
        for section, owner in owners.items()
        for name, hint in typing.get_type_hints(owner).items()
        if hint is str
    }


@cache
def registries() -> dict[str, Registry]:
    """The options whose value is a registered name, such as `method` and `sampling.sampler`, with their registries."""
    owners = {"": Config, **sections()}
    return {
        f"{section}.{name}".removeprefix("."): hint.__metadata__[0]
        for section, owner in owners.items()
        for name, hint in typing.get_type_hints(owner, include_extras=True).items()
        if isinstance(getattr(hint, "__metadata__", (None,))[0], Registry)
    }


def _shorten(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."


SHORT_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "batch": "batch_size",
    "temp": "temperature",
}
"""What options are called elsewhere, with their names here."""


def unknown_option_error(option: str) -> str | None:
    """The error message for an option that does not exist, with similar names; None if it exists."""
    known = descriptions()
    if option in known or option in sections():
        return None
    given = option = _shorten(option)
    start, dot, leaf = option.rpartition(".")
    leaf = SHORT_NAMES.get(leaf, leaf)
    option = f"{start}{dot}{leaf}"
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    similar = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    for found in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.7):
        similar += [name for name in by_leaf[found] if name not in similar]
    section = option.partition(".")[0]
    siblings = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
    if similar:
        hint = f"did you mean {' or '.join(similar[:3])}?"
    elif siblings:
        hint = f"{section} has {', '.join(siblings)}"
    else:
        hint = f"there are {', '.join(dict.fromkeys(name.partition('.')[0] for name in known))}"
    return f"unknown option {given!r}; {hint}"


EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dataclass_type": "a section of options, not a single value",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def describe_validation_error(error: ValidationError) -> str:
    """The first error that pydantic found, in one line with the option, the value and the remedy."""
    found, option = error.errors()[0], str(invalid_option(error))
    kind, context, value = found["type"], found.get("ctx", {}), found["input"]
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"{option} is not given and has no default: {descriptions()[option]}"
    entry = f"{option} {_format_value(value)}"
    for bound, phrase in BOUNDS.items():
        if bound in context:
            limit = context[bound]
            shown = f"{int(limit):,}" if limit == int(limit) else f"{limit:g}"
            return f"{entry} must be {phrase} {shown}: {descriptions()[option]}"
    if kind == "literal_error":
        return unknown_choice_error(option, value, re.findall(r"'([^']*)'", str(context["expected"])))
    return f"{entry} must be {EXPECTED_TYPES.get(kind, found['msg'])}"


def invalid_option(error: ValidationError) -> str | None:
    """The option of the first error that pydantic found; None if it is about several."""
    found = error.errors()[0]
    if found["type"] == "value_error":
        return getattr(found["ctx"]["error"], "option", None)
    names = {field.name for owner in (Config, *sections().values()) for field in dataclasses.fields(owner)}
    return ".".join(str(part) for part in found["loc"] if part in names)


def unknown_choice_error(option: str, value: object, choices: Iterable[str]) -> str:
    """The error message for a value that is not one of the choices."""
    names = list(choices)
    return f"{option} {_format_value(value)} is not one of {', '.join(names)}{suggestion(_shorten(str(value)), names)}"


def _format_value(value: object) -> str:
    return _shorten(repr(value) if isinstance(value, (str, dict, list)) else json.dumps(value))


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'NAME'?` with the known name closest to `name`, or nothing if none is similar."""
    close = difflib.get_close_matches(SHORT_NAMES.get(name, name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def add_descriptions(text: str) -> str:
    """A Config's YAML with the description of each option in a comment above it."""
    known, section, lines = descriptions(), "", []
    for line in text.splitlines():
        key, indent = line.split(":")[0].strip(), line[: len(line) - len(line.lstrip())]
        if not indent:
            section = key
        if not indent and key in sections():
            lines += ["", f"# {inspect.getdoc(sections()[key])}"]
        else:
            option = f"{section}.{key}" if indent else key
            choices = allowed_values(option)
            one_of = f" One of: {', '.join(choices)}." if choices else ""
            lines.append(f"{indent}# {known[option]}{one_of}")
        lines.append(line)
    return "\n".join(lines).strip() + "\n"


def allowed_values(option: str) -> tuple[str, ...]:
    """The allowed values of an option that is a Literal or a registered name; empty for other types."""
    if option in registries():
        return tuple(registries()[option])
    section, _, name = option.rpartition(".")
    hint = typing.get_type_hints(sections()[section] if section else Config)[name]
    alternatives = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    return tuple(
        value
        for alternative in alternatives
        if typing.get_origin(alternative) is typing.Literal
        for value in typing.get_args(alternative)
    )
