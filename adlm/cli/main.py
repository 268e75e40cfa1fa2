"""The command line: `adlm COMMAND ...`. Knows which commands there are and how a mistake is told, nothing of either.

Exit codes: 0 done, 1 a check did not pass, 2 the user's mistake (one sentence on standard error), 130 interrupted,
143 told to stop by SIGTERM.
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
from adlm.config.knobs import descriptions, suggestion
from adlm.errors import UserError
from adlm.files import reason

# Each command is a module of `commands` with EXAMPLE, add_arguments and run; it is imported when it is called.
COMMANDS = {
    "quickstart": "prepare, train and compare two small models on speeches, in minutes on a CPU",
    "presets": "list the presets, or print one resolved, with overrides",
    "prepare": "tokenise a corpus by name, your own text or a dataset of the hub, once, for training and evaluation",
    "train": "train any method on any text, resume or extend a run, plot runs; alone, or under torchrun",
    "perplexity": "what texts cost a model, with error bars: nats, bits, perplexity; models compared on the same draws",
    "reproduce": "hold models, or what was measured of them, against a table of the paper, with errors and caveats",
    "sample": "write text with a model: from nothing, after a prompt, or into the holes of a text",
    "judge": "measure a file of samples: generative perplexity, MAUVE, entropy, diversity, as a card with every choice",
    "import": "turn a checkpoint of the released code into a model folder, running nothing that it names",
    "parity": "compare this code with numbers of the released code",
    "bench": "measure how fast this machine trains a preset, or samples from one or from a model",
}
PATIENCE = 3.0
"""Seconds that a command has to end after Ctrl-C before another Ctrl-C ends it at once."""
MODULES = {"import": "import_checkpoint"}  # where a command cannot be a module's name


class Parser(argparse.ArgumentParser):
    """argparse, with its mistakes told as ours are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code of `adlm WORDS`; without words, this is the process that was started with them."""
    open_streams()
    if words is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interruption())
    try:
        code = run(_checked(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
        return code
    except UserError as error:
        if _tells():
            write_error(f"adlm: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads standard output any more, `head` say
        silence(sys.stdout)
        return 0
    except OSError as error:
        if error.filename is not None:  # a file that cannot be used: a name that is too long, say
            write_error(f"adlm: {error.filename}: {reason(error)}")
        elif error.errno == errno.ENOSPC:
            silence(sys.stdout)
            write_error("adlm: standard output cannot be written: there is no space left on its device")
        else:
            raise
        return 2
    finally:
        if words is None:  # the process ends here, and would die of one more Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class Interruption:
    """Ctrl-C once interrupts; again, it is ignored while the command ends, unless that takes too long.

    During an import it ends the process at once: packages swallow the exception, and fail later in odd ways.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        late = self._first is not None and time.monotonic() - self._first > PATIENCE
        if late or _imports(frame):
            os._exit(130)
        if self._first is None:
            self._first = time.monotonic()
            raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _checked(words: Sequence[str]) -> Sequence[str]:
    """Arguments must be text: a name that is not UTF-8 could be read, but not written down in configs and results."""
    for word in words:
        if "\0" in word:
            raise UserError(f"{word} has a null byte")
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise UserError(f"{word} is not UTF-8; rename the file, or give it through a link with another name")
    return words


def _tells() -> bool:
    """Of the processes that torchrun started, the first that finds a mistake: it is told once."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from adlm.distributed import is_first_to_report

    return is_first_to_report()


def run(words: Sequence[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UserError(f"there is no command {words[0]!r}{suggestion(words[0], COMMANDS)} (see adlm --help)")
    parser = Parser(prog="adlm", description="The Anchored Diffusion Language Model.")
    parser.add_argument("--version", action="version", version=f"adlm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        command = commands.add_parser(
            name, help=line, description=f"{line[0].upper()}{line[1:]}.", formatter_class=argparse.RawTextHelpFormatter
        )
        if words and words[0] == name:
            module = importlib.import_module(f"adlm.cli.{MODULES.get(name, name)}")
            command.epilog = f"example:\n  {module.EXAMPLE}"
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(words)
    if rest and hasattr(arguments, "words") and not any(word.startswith("-") for word in rest):
        arguments.words += rest  # knobs may stand after options too
    elif rest:
        asked = commands.choices.get(words[0], parser)
        name = rest[0].strip("-").partition("=")[0]
        knobs = [f"{knob}=..." for knob in descriptions() if knob.rpartition(".")[2] == name.replace("-", "_")]
        if hasattr(arguments, "words") and knobs:
            asked.error(f"unrecognized arguments: {' '.join(rest)}; as a knob it is {' or '.join(knobs)}")
        options = re.findall(r"(?<=--)[\w-]+", asked.format_usage())  # dashes would make any two alike
        asked.error(f"unrecognized arguments: {' '.join(rest)}{suggestion(name, options)}")
    return int(arguments.run(arguments))
