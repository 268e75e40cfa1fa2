"""Entry point of `adlm COMMAND ...`: lists the commands, dispatches to their modules and reports user errors.

Exit codes: 0 success, 1 a check failed, 2 user error (one line on standard error), 130 interrupted, 143 terminated by
SIGTERM.
"""

import argparse
import errno
import importlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING
from types import FrameType, ModuleType
from typing import Any, NoReturn, get_args, get_type_hints

from adlm import __version__
from adlm.cli.streams import open_streams, silence, write_error
from adlm.errors import UserError
from adlm.files import reason
from adlm.request import Option, Request, json_schema, options_of

# Every command, by purpose. Its module in adlm.cli has run(request), whose annotation is the record of the options.
# torch, which takes seconds, is imported inside run: help and wrong usage are quick.
GROUPS = {
    "start": {
        "quickstart": "train and compare two small models, minutes on a CPU",
        "fetch": "get the base weights of smollm2, once",
        "doctor": "check this machine: devices, packages, data, what works",
        "completion": "print the shell completion script for bash, zsh or fish",
    },
    "data and training": {
        "presets": "list the presets, or print one with overrides applied",
        "prepare": "tokenize a corpus, your own text or a dataset of the hub",
        "plan": "memory, speed and days of a run on given GPUs, before it starts",
        "train": "train a model; resume, extend or plot runs",
        "reason": "fine-tune causal models to solve problems (ACoT), evaluate them",
    },
    "evaluate": {
        "perplexity": "measure models on texts, with standard errors",
        "choose": "probabilities of the choices of a hole: classify by template",
        "judge": "measure samples: generative perplexity, MAUVE, diversity",
        "reproduce": "compare results with a table of the paper",
        "lm-eval": "run tasks of the lm-evaluation-harness, with its own options",
    },
    "generate": {
        "sample": "write text: freely, after a prompt, or into holes",
        "serve": "answer requests of OpenAI's completions and chat API over HTTP",
    },
    "exchange": {
        "import": "convert a checkpoint of the released code to a model folder",
        "export": "write a model for Hugging Face transformers, and upload it",
    },
    "check": {
        "parity": "compare this code with outputs of the released code",
        "bench": "measure the training or sampling speed of this machine",
    },
}
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}
EXAMPLES = {
    "start": "adlm quickstart --out runs/quickstart",
    "data and training": "adlm train own init=box data.path='texts/*.txt'",
    "evaluate": "adlm perplexity runs/own --data runs/own/data",
    "generate": 'adlm sample runs/own --prompt "The" --watch',
    "exchange": "adlm export runs/own --to hf --out exported/own",
    "check": "adlm bench train owt/adlm --batch 32",
}
FIRST_STEPS = """anchored diffusion language models

  adlm sample --prompt "The old man"           write with the model in the box
  adlm quickstart                              train a first model, in minutes
  adlm train own init=box data.path=book.txt   train it on your text: runs/own

adlm --help lists all commands
"""
MEANT = {
    "plot": "train --plot",
    "resume": "train --out",
    "fill": "sample --fill",
    "generate": "sample",
    "eval": "perplexity",
    "evaluate": "perplexity",
}
"""What other names for commands stand for."""
WITHOUT_TORCH = ("presets", "completion", "prepare", "fetch")
LEAST_MEMORY = 1_500_000_000
"""Bytes of virtual memory below which torch aborts or hangs, sometimes while it is imported."""
OUT_OF_MEMORY = re.compile("allocate memory|not enough memory|out of memory|failed to map segment", re.IGNORECASE)
INTERRUPT_GRACE_PERIOD = 3.0
"""Seconds after the first Ctrl-C before another Ctrl-C ends the process immediately."""
MODULES = {"import": "import_checkpoint", "lm-eval": "lm_eval"}  # commands whose name cannot name a module


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing usage, and takes no beginnings of options."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction):  # the choices of options are checked by their request
            super()._check_value(action, value)


class MainParser(Parser):
    """The parser of `adlm` itself, whose help lists the commands by purpose."""

    def __init__(self, prog: str):
        super().__init__(prog=prog)
        self.commands: argparse._SubParsersAction[argparse.ArgumentParser] = self.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=Parser
        )

    def format_help(self) -> str:
        lines = [f"usage: {self.prog} COMMAND ...", "", "Anchored diffusion language models."]
        for group, commands in GROUPS.items():
            lines += ["", f"{group}:", *(f"  {name:{len('perplexity')}}  {line}" for name, line in commands.items())]
            lines += [f"  example: {EXAMPLES[group]}"]
        lines += ["", f"{self.prog} COMMAND --help explains a command, with examples; {self.prog} --version"]
        lines += [f"{self.prog} COMMAND --help --json prints its options as a JSON schema"]
        return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `adlm ARGV` and return the exit code; None runs sys.argv as the main program."""
    open_streams()
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, InterruptHandler())
    try:
        if argv is None and "_ARGCOMPLETE" in os.environ:  # the shell completes the command line
            from adlm.cli.completion import print_completions, words_before_cursor

            words = words_before_cursor()
            print_completions(build_parser(words), *words[:1])
        code = run(_check_encoding(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        if _should_report():
            write_error(f"adlm: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # standard output has no reader any more, as with `| head`
        silence(sys.stdout)
        return 0
    except OSError as error:
        if error.filename is not None:  # a file that cannot be used, such as a name that is too long
            write_error(f"adlm: {error.filename}: {reason(error)}")
        elif error.errno == errno.ENOSPC:
            silence(sys.stdout)
            write_error("adlm: standard output cannot be written: no space left on device")
        else:
            raise
        return 2
    except (MemoryError, RuntimeError, ImportError) as error:
        if "can't start new thread" in str(error):
            write_error("adlm: no more threads can be started; raise the limits (ulimit -u and -v; a container's pids)")
        elif isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
            write_error("adlm: out of memory; free some, raise the limit (ulimit -v), or use a smaller batch or model")
        else:
            raise
        return 2
    finally:
        if argv is None:  # the process ends here; another Ctrl-C must not change its exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class InterruptHandler:
    """SIGINT handler: the first Ctrl-C raises KeyboardInterrupt; later ones are ignored for a grace period.

    During an import, Ctrl-C ends the process immediately: some packages swallow the exception and fail later.
    """

    def __init__(self) -> None:
        self._interrupted_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        grace_period_is_over = (
            self._interrupted_at is not None and time.monotonic() - self._interrupted_at > INTERRUPT_GRACE_PERIOD
        )
        if grace_period_is_over or _is_importing(frame):
            os._exit(130)
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _check_encoding(argv: Sequence[str]) -> Sequence[str]:
    """Arguments must be valid UTF-8: other file names can be read, but not stored in configs and results."""
    for argument in argv:
        if "\0" in argument:
            raise UserError(f"{argument} has a null byte")
        if not argument.isascii() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"{argument} is not UTF-8; rename the file, or pass a symbolic link with another name")
    return argv


def _should_report() -> bool:
    """Under torchrun, only the first process that fails prints the error."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from adlm.distributed import is_first_to_report

    return is_first_to_report()


def run(argv: Sequence[str]) -> int:
    if not argv:
        sys.stdout.write(FIRST_STEPS)
        return 0
    if argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        raise UserError(f"{argv[0]} comes before the command; give the command first (see adlm --help)")
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        from adlm.config.options import suggestion

        words = [*MEANT.get(argv[0], "").split(), *argv[1:]]
        if argv[0] == "help":
            words = [*(word for word in argv[1:] if word in COMMANDS), "--help"]
        meant = f"; try adlm {shlex.join(words)}" if argv[0] in ("help", *MEANT) else ""
        raise UserError(f"there is no command {argv[0]!r}{meant or suggestion(argv[0], COMMANDS)} (see adlm --help)")
    parser = build_parser(argv)
    if argv[0] in COMMANDS and "--json" in argv and {"--help", "-h"} & set(argv):
        schemas = {request.action: json_schema(request) for request in _requests(argv[0])}
        schema = schemas.get("") or schemas.get(argv[1], schemas)  # of the command, else of its subcommands by name
        sys.stdout.write(f"{json.dumps(schema)}\n")
        return 0
    arguments, rest = parser.parse_known_args(argv)
    takes_overrides = hasattr(arguments, "overrides")
    if rest and takes_overrides and not any(argument.startswith("-") for argument in rest):
        arguments.overrides = [*arguments.overrides, *rest]  # overrides may also follow options
    elif rest and not any(option.forwarded for option in options_of(arguments.request)):
        _refuse_arguments(parser.commands.choices[argv[0]], rest, takes_overrides)
    if argv[0] not in WITHOUT_TORCH:
        _check_virtual_memory()
    return int(_import(argv[0]).run(request_of(arguments, argv[1:])))


def _requests(command: str) -> tuple[type[Request], ...]:
    """The records that a command takes: one, or one for each subcommand."""
    annotation = get_type_hints(_import(command).run)["request"]
    return get_args(annotation) or (annotation,)


def _check_virtual_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < LEAST_MEMORY:
        raise UserError(
            f"ulimit -v {limit // 1024} leaves {limit / 1e9:.2g} GB of virtual memory, and torch needs "
            f"{LEAST_MEMORY / 1e9:g}; write ulimit -v unlimited"
        )


def build_parser(argv: Sequence[str]) -> MainParser:
    """The parser of all commands, with the arguments of the one that argv calls."""
    parser = MainParser(prog="adlm")
    parser.add_argument("--version", action="version", version=f"adlm {__version__}")
    for name, line in COMMANDS.items():
        if argv and argv[0] == name:
            add_command(parser.commands, name, line, _requests(name))
        else:
            parser.commands.add_parser(name)
    return parser


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
        if option.positional:
            groups[option.group].add_argument(option.name, **_settings(option))
        else:
            groups[option.group].add_argument(option.flag, dest=option.name, **_settings(option))


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


def _import(command: str) -> ModuleType:
    return importlib.import_module(f"adlm.cli.{MODULES.get(command, command)}")


def _refuse_arguments(command: argparse.ArgumentParser, rest: Sequence[str], takes_overrides: bool) -> NoReturn:
    """The user error for unknown options, with the config option or command-line option that may have been meant."""
    from adlm.config.options import descriptions, suggestion

    name, _, value = rest[0].strip("-").partition("=")
    if takes_overrides and name == "data":
        text = value or next(iter(rest[1:]), "FILE")
        command.error(f"unrecognized arguments: {' '.join(rest)}; your own text goes by data.path={shlex.quote(text)}")
    overrides = [f"{option}=..." for option in descriptions() if option.rpartition(".")[2] == name.replace("-", "_")]
    overrides.sort(key=lambda option: not option.startswith(f"{command.prog.rpartition(' ')[2]}."))  # train.steps first
    if takes_overrides and overrides:
        command.error(f"unrecognized arguments: {' '.join(rest)}; as a config option: {' or '.join(overrides)}")
    options = re.findall(r"(?<=--)[\w-]+", command.format_usage())  # without dashes, which make all names similar
    meant = suggestion(name, options).replace("'", "'--", 1)
    command.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
