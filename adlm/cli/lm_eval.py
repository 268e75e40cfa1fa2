"""`adlm lm-eval`: the command line of the lm-evaluation-harness, with the models of adlm registered there."""

import argparse
from collections.abc import Sequence

from adlm.cli.streams import write_error
from adlm.errors import UserError

USER_ERRORS = (
    "Attempted to load model",
    "Config file not found",
    "No tasks specified",
    "Specify --output_path",
    "Tasks not found",
)
"""Beginnings of exceptions by which the harness reports wrong arguments."""


def run(arguments: argparse.Namespace) -> int:
    write_error("loading the lm-evaluation-harness and its tasks: 10 to 60 seconds")  # before imports that take long
    from adlm.apps.harness import run_harness  # here, so that --help needs no lm-eval

    try:
        run_harness(with_defaults(arguments.forwarded))
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except ConnectionError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{reason}; the data of this task is not on this machine, so it needs a network") from None
    except (ValueError, FileNotFoundError) as error:
        if isinstance(error, UserError) or not str(error).startswith(USER_ERRORS):
            raise
        raise UserError(f"{error} (see adlm lm-eval --help)") from None
    return 0


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments of a run, with `--model adlm` unless there is another model, and the batch size and device `auto`.

    Without them the harness runs single rows on cuda:0. With --config, the file is the place for all of them.
    """
    is_run = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("--config", "-C"), ("--model", "-M"), ("--batch_size", "-b"), ("--device",)):
        parser.add_argument(*names, nargs="?", const="")  # without a value, the harness reports it
    given, _ = parser.parse_known_args(arguments)
    if not is_run or given.config is not None or given.model not in (None, "adlm"):
        return list(arguments)
    defaults = {"model": "adlm", "batch_size": "auto", "device": "auto"}
    added = [(f"--{name}", value) for name, value in defaults.items() if getattr(given, name) is None]
    return [*arguments, *(word for pair in added for word in pair)]
