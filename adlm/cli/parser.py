"""Parsers made from requests: the arguments of a command are the fields of its record. Imports no command."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from adlm.errors import UserError
from adlm.request import Parameter, Request, parameters


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction):  # the choices of options are checked by their request
            super()._check_value(action, value)


def add_command(
    subparsers: "argparse._SubParsersAction[Any]", name: str, line: str, requests: Sequence[type[Request]]
) -> None:
    """The parser of a command, with its line in the list of commands, its options and its example."""
    parser = subparsers.add_parser(
        name,
        help=line,
        description=f"{line[0].upper()}{line[1:]}.",
        epilog="example:\n  " + "\n  ".join(request.example for request in requests),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    if len(requests) == 1:
        add_options(parser, requests[0])
        return
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for request in requests:
        first_line = str(request.__doc__).partition("\n")[0].rstrip(".")
        add_command(actions, request.action, f"{first_line[0].lower()}{first_line[1:]}", [request])


def add_options(parser: argparse.ArgumentParser, request: type[Request]) -> None:
    parser.set_defaults(request=request)
    groups: dict[str, Any] = {"": parser}
    for parameter in parameters(request):
        if parameter.option.forwarded:
            parser.usage = f"%(prog)s {parameter.flag}..."
            continue
        group = parameter.option.group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        name = parameter.name if parameter.option.positional else parameter.flag
        groups[group].add_argument(name, **_settings(parameter))


def _settings(parameter: Parameter) -> dict[str, Any]:
    """The keywords of add_argument for an option."""
    described, default, help_text = parameter.option, parameter.default, parameter.help.replace("%", "%%")
    is_required, is_tuple = default is MISSING, parameter.num_values is not None
    if parameter.type is bool:
        action = argparse.BooleanOptionalAction if default is None else "store_true"
        return {"action": action, "default": default, "help": help_text}
    settings: dict[str, Any] = {"metavar": parameter.metavar, "help": help_text, "type": parameter.type}
    if described.commas:
        settings["type"] = _split
    elif parameter.choices:
        settings["choices"] = parameter.choices
    if not is_required:
        settings["default"] = [] if described.repeated else default
    if described.repeated:
        settings["action"] = "append"
    elif is_tuple and not described.commas:
        settings["nargs"] = parameter.num_values or ("+" if is_required or not described.positional else "*")
    elif described.positional and not is_required:
        settings["nargs"] = "?"
    if is_required and not described.positional:
        settings["required"] = True
    return settings


def _split(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def request_of(arguments: argparse.Namespace, words: Sequence[str]) -> Request:
    """The record of the parsed arguments, checked; `words` are all words after the command."""
    values = {}
    for parameter in parameters(arguments.request):
        value = words if parameter.option.forwarded else getattr(arguments, parameter.name)
        values[parameter.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    request: Request = arguments.request(**values)
    return request


def is_forwarding(arguments: argparse.Namespace) -> bool:
    """Whether the words are the options of another program, as those of `adlm lm-eval`."""
    return any(parameter.option.forwarded for parameter in parameters(arguments.request))
