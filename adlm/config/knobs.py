"""What the schema says of itself, and the sentence for a knob that is wrong. Knows no files."""

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


@cache
def sections() -> dict[str, type]:
    """The fields of Config that are records of knobs themselves."""
    found = {}
    for name, hint in typing.get_type_hints(Config).items():
        for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if dataclasses.is_dataclass(option):
                found[name] = typing.cast(type, option)
    return found


@cache
def descriptions() -> dict[str, str]:
    """Every knob, dotted, with the sentence under it in the schema."""
    return dict(_sentences(Config, ""))


def _sentences(owner: type, prefix: str) -> Iterator[tuple[str, str]]:
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(owner)).body[0]).body
    for statement, follower in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if owner is Config and name in sections():
            yield from _sentences(sections()[name], f"{name}.")
        elif isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            yield f"{prefix}{name}", str(follower.value.value)


@cache
def texts() -> set[str]:
    """The knobs whose value is any text: it is taken as it is written, `data.path=*.txt` too."""
    owners = {"": Config, **sections()}
    return {
        f"{section}.{name}".removeprefix(".")
        for section, owner in owners.items()
        for name, hint in typing.get_type_hints(owner).items()
        if hint is str
    }


def _short(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."


def unknown(knob: str) -> str | None:
    """The sentence for a knob that does not exist, with the likely one; None where it does exist."""
    known = descriptions()
    if knob in known or knob in sections():
        return None
    knob = _short(knob)
    leaf = knob.rpartition(".")[2]
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    near = difflib.get_close_matches(knob, known, n=1, cutoff=0.75)
    for found in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.7):
        near += [name for name in by_leaf[found] if name not in near]
    section = knob.partition(".")[0]
    inside = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
    if near:
        hint = f"did you mean {' or '.join(near[:3])}?"
    elif inside:
        hint = f"{section} has {', '.join(inside)}"
    else:
        hint = f"there are {', '.join(dict.fromkeys(name.partition('.')[0] for name in known))}"
    return f"unknown knob {knob!r}; {hint}"


WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dataclass_type": "a section of knobs, not a single value",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def in_words(error: ValidationError) -> str:
    """The first mistake pydantic found, as a sentence with the knob, the value and the remedy."""
    found = error.errors()[0]
    knob = ".".join(str(part) for part in found["loc"] if part in _field_names())
    kind, context, value = found["type"], found.get("ctx", {}), found["input"]
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"{knob} is not given and has no default: {descriptions()[knob]}"
    shown = f"{knob} {_short(repr(value) if isinstance(value, (str, dict, list)) else json.dumps(value))}"
    for bound, phrase in BOUNDS.items():
        if bound in context:
            return f"{shown} must be {phrase} {_number(context[bound])}: {descriptions()[knob]}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{shown} is not one of {', '.join(choices)}{suggestion(_short(str(value)), choices)}"
    return f"{shown} must be {WANTED.get(kind, found['msg'])}"


def _number(bound: float) -> str:
    """A bound as people write it: 1024, 2,147,483,647, 0.5."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """A closing `did you mean`, where one of the known names is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def explained(text: str) -> str:
    """A Config's YAML with the schema's sentence above each knob."""
    known, section, lines = descriptions(), "", []
    for line in text.splitlines():
        key, indent = line.split(":")[0].strip(), line[: len(line) - len(line.lstrip())]
        if not indent:
            section = key
        if not indent and key in sections():
            lines += ["", f"# {inspect.getdoc(sections()[key])}"]
        else:
            knob = f"{section}.{key}" if indent else key
            choices = _choices(knob)
            one_of = f" One of: {', '.join(choices)}." if choices else ""
            lines.append(f"{indent}# {known[knob]}{one_of}")
        lines.append(line)
    return "\n".join(lines).strip() + "\n"


def _choices(knob: str) -> tuple[str, ...]:
    """The values a knob may take, where they are named."""
    section, _, name = knob.rpartition(".")
    hint = typing.get_type_hints(sections()[section] if section else Config)[name]
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    return tuple(
        name for option in options if typing.get_origin(option) is typing.Literal for name in typing.get_args(option)
    )


@cache
def _field_names() -> set[str]:
    return {field.name for owner in (Config, *sections().values()) for field in dataclasses.fields(owner)}
