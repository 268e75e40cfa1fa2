"""`adlm lm-eval`: the command line of the lm-evaluation-harness, with the models of adlm registered there."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from adlm.cli.streams import write_error
from adlm.errors import UserError
from adlm.request import Request, option

USER_ERRORS = (
    "Attempted to load model",
    "Config file not found",
    "No tasks specified",
    "Specify --output_path",
    "Tasks not found",
)
"""Beginnings of exceptions by which the harness reports wrong arguments."""


@dataclass(frozen=True)
class LmEvalRequest(Request):
    """The options of `adlm lm-eval`: those of the harness."""

    example = """adlm lm-eval --model_args path=runs/own --tasks arc_easy,lambada_openai --output_path results
  adlm lm-eval --model_args path=box --tasks sentence_ends --include_path examples/lm_eval
  adlm lm-eval --model_args path=runs/own,samples=128,seed=1 --tasks hellaswag --limit 100
  adlm lm-eval --model_args path=runs/own,sampler=confidence,steps=64 --tasks gsm8k --num_fewshot 2
  adlm lm-eval ls tasks

All arguments are those of `lm-eval` (see `lm-eval run --help`), and --model is adlm unless given. Arguments of the
model, in --model_args:
  path=FOLDER   a run folder or model folder
  samples=K     masks per continuation, an even number (default: 64; ar and a2r need none)
  target_stderr=E  more masks where the standard error is above E nats (default: none), up to max_samples (1024)
  seed=S        seed of masks and generation (default: 0)
  sampler=NAME  of generated text, and steps=T (default: the model's config)
  length=L      tokens of context and continuation together (default: the model's length)"""

    words: tuple[str, ...] = option("of lm-eval", (), positional=True, forwarded=True, metavar="ARGUMENTS")


def run(request: LmEvalRequest) -> int:
    write_error("loading the lm-evaluation-harness and its tasks: 10 to 60 seconds")  # before imports that take long
    from adlm.apps.harness import run_harness  # here, so that --help needs no lm-eval

    try:
        run_harness(with_defaults(request.words))
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
