"""Parsers made from requests: the arguments of a command are the fields of its record. Imports no command."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from adlm.errors import UserError
from adlm.request import Option, Request, options_of


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
    for option in options_of(request):
        if option.forwarded:
            parser.usage = f"%(prog)s {option.flag}..."
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument(option.name if option.positional else option.flag, **_settings(option))


def _settings(option: Option) -> dict[str, Any]:
    """The keywords of add_argument for an option."""
    default, is_required, help_text = option.default, option.default is MISSING, option.help.replace("%", "%%")
    if option.kind is bool:
        action = argparse.BooleanOptionalAction if default is None else "store_true"
        return {"action": action, "default": default, "help": help_text}
    settings: dict[str, Any] = {"metavar": option.value_name, "help": help_text, "type": option.kind}
    if option.commas:
        settings["type"] = lambda text: [word for word in text.split(",") if word]
    elif option.choices:
        settings["choices"] = tuple(option.choices)
    if not is_required:
        settings["default"] = [] if option.repeated else default
    if option.repeated:
        settings["action"] = "append"
    elif option.num_values is not None and not option.commas:
        settings["nargs"] = option.num_values or ("+" if is_required or not option.positional else "*")
    elif option.positional and not is_required:
        settings["nargs"] = "?"
    if is_required and not option.positional:
        settings["required"] = True
    return settings


def request_of(arguments: argparse.Namespace, words: Sequence[str]) -> Request:
    """The record of the parsed arguments, checked; `words` are all words after the command."""
    values = {}
    for option in options_of(arguments.request):
        value = words if option.forwarded else getattr(arguments, option.name)
        values[option.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    request: Request = arguments.request(**values)
    return request


def is_forwarding(arguments: argparse.Namespace) -> bool:
    """Whether the words are the options of another program, as those of `adlm lm-eval`."""
    return any(option.forwarded for option in options_of(arguments.request))
