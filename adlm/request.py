"""Requests: the options of a command as fields of a frozen dataclass, each with its help text and its bounds.

The parser, `--help`, the JSON schema, the checks and the provenance of a command are made from these fields. Imports
no torch and no parser.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from adlm.errors import UserError

Record = TypeVar("Record")


class Option(NamedTuple):
    """What a field of a request says about its option, besides its name, type and default."""

    help: str
    """The default is added to it, unless it names the default itself."""
    metavar: str | tuple[str, ...] | None = None
    """The name of the value in `--help`, by default from its type."""
    group: str = ""
    """The title under which `--help` lists the option."""
    choices: Sequence[str] | Mapping[Any, str] = ()
    """The allowed values, of a Mapping with their meanings; not needed for a Literal."""
    minimum: float | None = None
    maximum: float | None = None
    remedy: str = ""
    """Added to the error message for a number out of bounds."""
    positional: bool = False
    repeated: bool = False
    """Of a tuple: one value each time the option is given, instead of all values after it."""
    commas: bool = False
    """Of a tuple: one word with the values between commas."""
    forwarded: bool = False
    """All words of the command line, as they are: the options of another program."""


def option(
    help: str,
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
    """A field of a request, given by keyword; see Option. Without a default it must be given."""
    described = Option(help, metavar, group, choices, minimum, maximum, remedy, positional, repeated, commas, forwarded)
    return field(default=default, metadata={"option": described}, kw_only=True)


METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}


class Parameter(NamedTuple):
    """An option of a request with what its field says: name, default and type."""

    name: str
    option: Option
    default: Any
    """MISSING where the option must be given."""
    type: type
    """bool, int, float, str or Path; of a tuple, that of its items."""
    num_values: int | None
    """The number of values of a tuple, 0 for any number; None for a single value."""
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return str(self.metavar) if self.option.positional else f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str | tuple[str, ...] | None:
        """None for a list of choices, which argparse shows itself."""
        if self.option.metavar is not None or (self.choices and not self.option.commas):
            return self.option.metavar
        if self.option.positional:
            return self.name.upper() if self.num_values is None else self.name.upper().removesuffix("S")
        return METAVARS.get(self.type)

    @property
    def help(self) -> str:
        text, default = self.option.help, self.default
        if isinstance(self.option.choices, Mapping):
            meanings = "\n".join(f"{name}: {meaning}" for name, meaning in self.option.choices.items())
            text = f"{meanings}\n{text}"
        if (
            isinstance(default, (int, float, str, Path))
            and default is not False
            and default != ""
            and "(default" not in text
        ):
            text += f" (default: {default})"
        return text

    def check(self, value: Any) -> None:
        option = self.option
        if self.choices and value not in self.choices:
            from adlm.config.options import unknown_choice_error

            raise UserError(unknown_choice_error(self.flag, value, self.choices))
        remedy = f"; {option.remedy}" if option.remedy else ""
        if option.minimum is not None and not value >= option.minimum:
            least = f"at least {option.minimum:,}" if option.minimum else "0 or more"
            raise UserError(f"{self.flag} {value} must be {least}{remedy}")
        if option.maximum is not None and not value <= option.maximum:
            raise UserError(f"{self.flag} {value} must be at most {option.maximum:,}{remedy}")


def parameters(request: type) -> tuple[Parameter, ...]:
    """The options of a request, in the order of their fields; fields that are no option() are left out."""
    hints = get_type_hints(request)
    return tuple(
        _parameter(each.name, hints[each.name], each.default, each.metadata["option"])
        for each in fields(request)
        if "option" in each.metadata
    )


def _parameter(name: str, hint: Any, default: Any, described: Option) -> Parameter:
    if get_origin(hint) in (Union, UnionType):  # X | None
        [hint] = (alternative for alternative in get_args(hint) if alternative is not NoneType)
    num_values = None
    if get_origin(hint) is tuple:
        items = get_args(hint)
        hint, num_values = items[0], 0 if items[-1] is Ellipsis else len(items)
    choices = tuple(described.choices)
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    return Parameter(name, described, default, hint, num_values, choices)


@dataclass(frozen=True)
class Request:
    """The options of one command. The numbers and names are checked when a request is made."""

    example: ClassVar[str] = ""
    """Command lines for `--help`."""
    action: ClassVar[str] = ""
    """The name of the subcommand, if it is one."""

    def __post_init__(self) -> None:
        for parameter in parameters(type(self)):
            value = getattr(self, parameter.name)
            for item in value if parameter.num_values is not None and value is not None else (value,):
                if item is not None:
                    parameter.check(item)


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def json_schema(request: type) -> dict[str, Any]:
    """The JSON schema of a request; an option that is left out has its default."""
    return {
        "title": request.__name__,
        "description": (request.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": {each.name: dict(_property(each)) for each in parameters(request)},
        "required": [each.name for each in parameters(request) if each.default is MISSING],
        "additionalProperties": False,
    }


def _property(parameter: Parameter) -> Iterator[tuple[str, Any]]:
    described = parameter.option
    bounds = {"enum": list(parameter.choices), "minimum": described.minimum, "maximum": described.maximum}
    value: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound not in (None, [])}
    value["type"] = JSON_TYPES[parameter.type]
    yield "description", parameter.help
    if parameter.num_values is None:
        yield from value.items()
    else:
        yield from {"type": "array", "items": value}.items()
        if parameter.num_values:
            yield from {"minItems": parameter.num_values, "maxItems": parameter.num_values}.items()
    if parameter.default not in (MISSING, None):
        yield "default", to_json(parameter.default)


def to_json(value: Any) -> Any:
    """A request, or a value of one, as JSON: for the provenance of results."""
    if isinstance(value, Request):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def narrow(request: Request, record: type[Record]) -> Record:
    """The record with the values of the request's fields of the same names."""
    names = {each.name for each in fields(request)} & {each.name for each in fields(record)}  # type: ignore[arg-type]
    return record(**{name: getattr(request, name) for name in names})
