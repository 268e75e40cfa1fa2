"""Requests: the options of a command as fields of a frozen dataclass, each with its help text and its bounds.

The parser, `--help`, the JSON schema, the checks and the provenance of a command are made from these fields. Imports
no torch and no parser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from adlm.errors import UserError

METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}

Record = TypeVar("Record")


@dataclass(frozen=True)
class Option:
    """An option of a command: what option() says of it, and the name, default and type of its field."""

    text: str
    metavar: str | tuple[str, ...] | None
    group: str
    """The title under which `--help` lists the option."""
    choices: Sequence[str] | Mapping[Any, str]
    """The allowed values; of a Mapping, with their meanings."""
    minimum: float | None
    maximum: float | None
    remedy: str
    positional: bool
    repeated: bool
    commas: bool
    forwarded: bool
    name: str = ""
    """Of the field; it ends in _ where the option is a word of Python, as `from_`."""
    default: Any = None
    """MISSING where the option must be given."""
    kind: type = str
    """bool, int, float, str or Path; of a tuple, that of its items."""
    num_values: int | None = None
    """The number of values of a tuple, 0 for any number; None for a single value."""

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        if self.positional:
            return str(self.value_name or self.name.upper())
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def value_name(self) -> str | tuple[str, ...] | None:
        """What `--help` calls the value; None for choices, which argparse lists."""
        if self.metavar is not None or (self.choices and not self.commas):
            return self.metavar
        if self.positional:
            return self.name.upper() if self.num_values is None else self.name.upper().removesuffix("S")
        return METAVARS.get(self.kind)

    @property
    def help(self) -> str:
        """The text, with the meanings of the choices before it, and after it the default unless the text has it."""
        text, default = self.text, self.default
        if isinstance(self.choices, Mapping):
            meanings = "\n".join(f"{name}: {meaning}" for name, meaning in self.choices.items())
            text = f"{meanings}\n{text}".rstrip()
        is_shown = isinstance(default, (int, float, str, Path)) and default is not False and default != ""
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{text} (default: {shown})" if is_shown and "(default" not in text else text

    def check(self, value: Any) -> None:
        """A user error for a value that is not one of the choices, or out of bounds."""
        if self.choices and value not in self.choices:
            from adlm.config.options import unknown_choice_error

            raise UserError(unknown_choice_error(self.flag, value, self.choices), self.name)
        remedy = f"; {self.remedy}" if self.remedy else ""
        if self.minimum is not None and not value >= self.minimum:
            least = f"at least {self.minimum:,}" if self.minimum else "0 or more"
            raise UserError(f"{self.flag} {value} must be {least}{remedy}", self.name)
        if self.maximum is not None and not value <= self.maximum:
            raise UserError(f"{self.flag} {value} must be at most {self.maximum:,}{remedy}", self.name)


def option(
    help: str = "",
    default: Any = MISSING,
    *,
    metavar: str | tuple[str, ...] | None = None,
    group: str = "",
    choices: Sequence[str] | Mapping[Any, str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    remedy: str = "",
    positional: bool = False,
    repeated: bool = False,
    commas: bool = False,
    forwarded: bool = False,
) -> Any:
    """A field of a request; without a default it must be given, by keyword.

    The choices are those of a Literal, or given here, as a dict with their meanings. `remedy` ends the error message
    for a number out of bounds. A tuple takes all words after the option; with `repeated` one each time it is given,
    with `commas` one word with commas. With `forwarded` the field is the whole command line, for another program.
    """
    described = Option(help, metavar, group, choices, minimum, maximum, remedy, positional, repeated, commas, forwarded)
    return field(default=default, metadata={"option": described}, kw_only=default is MISSING)


def options_of(request: type) -> list[Option]:
    """The options of a request, in the order of their fields; fields that are no option() are left out."""
    hints, found = get_type_hints(request), []
    for each in fields(request):
        if "option" not in each.metadata:
            continue
        hint, num_values, described = hints[each.name], None, each.metadata["option"]
        if get_origin(hint) in (Union, UnionType):  # X | None
            [hint] = (alternative for alternative in get_args(hint) if alternative is not NoneType)
        if get_origin(hint) is tuple:
            items = get_args(hint)
            hint, num_values = items[0], 0 if items[-1] is Ellipsis else len(items)
        if get_origin(hint) is Literal:
            described, hint = replace(described, choices=described.choices or get_args(hint)), str
        found.append(replace(described, name=each.name, default=each.default, kind=hint, num_values=num_values))
    return found


@dataclass(frozen=True)
class Request:
    """The options of one command. The numbers and names are checked when a request is made."""

    example: ClassVar[str] = ""
    """Command lines for `--help`."""
    action: ClassVar[str] = ""
    """The name of the subcommand, if it is one."""

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            for item in value if each.num_values is not None and value is not None else (value,):
                if item is not None:
                    each.check(item)


def narrow(request: Request, record: type[Record]) -> Record:
    """The record with the values of the request's fields of the same names."""
    names = {each.name for each in fields(request)} & {each.name for each in fields(record)}  # type: ignore[arg-type]
    return record(**{name: getattr(request, name) for name in names})


def json_schema(request: type) -> dict[str, Any]:
    """The JSON schema of a request; an option that is left out has its default."""
    properties = {}
    for each in options_of(request):
        bounds = {"enum": list(each.choices), "minimum": each.minimum, "maximum": each.maximum}
        value: dict[str, Any] = {"type": JSON_TYPES[each.kind]}
        value |= {name: bound for name, bound in bounds.items() if bound not in (None, [])}
        if each.num_values is not None:
            value = {"type": "array", "items": value}
        if each.num_values:
            value |= {"minItems": each.num_values, "maxItems": each.num_values}
        if each.default not in (MISSING, None):
            value["default"] = to_json(each.default)
        properties[each.name] = {"description": each.help, **value}
    return {
        "title": request.__name__,
        "description": (request.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": [each.name for each in options_of(request) if each.default is MISSING],
        "additionalProperties": False,
    }


def to_json(value: Any) -> Any:
    """A request, or a value of one, as JSON: for the provenance of results."""
    if isinstance(value, Request):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
