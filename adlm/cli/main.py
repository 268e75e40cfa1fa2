"""Entry point of `adlm COMMAND ...`: lists the commands, dispatches to their modules and reports user errors.

Exit codes: 0 success, 1 a check failed, 2 user error (one line on standard error), 130 interrupted, 143 terminated by
SIGTERM.
"""

import argparse
import errno
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from adlm import __version__
from adlm.cli.console import open_streams, silence, write_error
from adlm.config.options import descriptions, suggestion
from adlm.errors import UserError
from adlm.files import reason

# Each command is a module of adlm.cli with EXAMPLE, add_arguments and run, imported only when it is called.
COMMANDS = {
    "quickstart": "prepare data, then train and compare two small models in minutes on a CPU",
    "presets": "list the presets, or print one with overrides applied",
    "prepare": "tokenize a named corpus, your own text or a Hugging Face dataset for training and evaluation",
    "train": "train a model, resume or extend a run, or plot runs; single-process or under torchrun",
    "perplexity": "measure perplexity of models on texts, with standard errors, and compare models",
    "reproduce": "compare models, or saved results, with a table of the paper, with standard errors and caveats",
    "sample": "generate text with a model: unconditionally, after a prompt, or by infilling",
    "serve": "serve models over HTTP with the completions API of OpenAI: completion, infilling, streaming",
    "judge": "evaluate a samples file: generative perplexity, MAUVE, entropy and diversity, as a metric card",
    "lm-eval": "evaluate a model on tasks of the lm-evaluation-harness, with its own options",
    "reason": "fine-tune a causal language model to solve problems (ACoT and baselines), evaluate and watch it",
    "import": "convert a checkpoint of the released code to a model folder, without executing code from it",
    "export": "write a model as a folder that Hugging Face transformers loads without adlm, and upload it",
    "parity": "compare this implementation with reference outputs of the released code",
    "bench": "measure the training or sampling speed of this machine",
}
INTERRUPT_GRACE_PERIOD = 3.0
"""Seconds after the first Ctrl-C before another Ctrl-C ends the process immediately."""
MODULES = {"import": "import_checkpoint", "lm-eval": "lm_eval"}  # commands whose name cannot name a module


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `adlm ARGV` and return the exit code; None runs sys.argv as the main program."""
    open_streams()
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, InterruptHandler())
    try:
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
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"there is no command {argv[0]!r}{suggestion(argv[0], COMMANDS)} (see adlm --help)")
    parser = Parser(
        prog="adlm", description="Anchored diffusion language models: data, training, sampling and evaluation."
    )
    parser.add_argument("--version", action="version", version=f"adlm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        command = commands.add_parser(
            name, help=line, description=f"{line[0].upper()}{line[1:]}.", formatter_class=argparse.RawTextHelpFormatter
        )
        if argv and argv[0] == name:
            module = importlib.import_module(f"adlm.cli.{MODULES.get(name, name)}")
            command.epilog = f"example:\n  {module.EXAMPLE}"
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(argv)
    takes_overrides = hasattr(arguments, "overrides")
    if hasattr(arguments, "forwarded"):  # the options of another program
        arguments.forwarded = list(argv[1:])
    elif rest and takes_overrides and not any(argument.startswith("-") for argument in rest):
        arguments.overrides += rest  # overrides may also follow options
    elif rest:
        _refuse_arguments(commands.choices.get(argv[0], parser), rest, takes_overrides)
    return int(arguments.run(arguments))


def _refuse_arguments(command: argparse.ArgumentParser, rest: Sequence[str], takes_overrides: bool) -> NoReturn:
    """The user error for unknown options, with the config option or command-line option that may have been meant."""
    name = rest[0].strip("-").partition("=")[0]
    overrides = [f"{option}=..." for option in descriptions() if option.rpartition(".")[2] == name.replace("-", "_")]
    if takes_overrides and overrides:
        command.error(f"unrecognized arguments: {' '.join(rest)}; as a config option: {' or '.join(overrides)}")
    options = re.findall(r"(?<=--)[\w-]+", command.format_usage())  # without dashes, which make all names similar
    command.error(f"unrecognized arguments: {' '.join(rest)}{suggestion(name, options)}")
