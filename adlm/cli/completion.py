"""`adlm completion`: the script that makes a shell complete `adlm` by calling it, and what it answers (argcomplete)."""

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import argcomplete
from argcomplete.shell_integration import shellcode

from adlm.config.load import preset_titles
from adlm.config.options import allowed_values, descriptions
from adlm.data.sources.corpora import CORPORA
from adlm.registry import SAMPLERS
from adlm.request import Request, option


@dataclass(frozen=True)
class ShellCompletionRequest(Request):
    """The options of `adlm completion`."""

    example = """adlm completion bash > ~/.local/share/bash-completion/completions/adlm
  adlm completion zsh > ~/.zfunc/_adlm         with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  adlm completion fish > ~/.config/fish/completions/adlm.fish
  eval "$(adlm completion bash)"               for this shell only

Create the folder first if it does not exist, and open a new shell. The script asks adlm for the words, so it need not
be written again after an update."""

    shell: Literal["bash", "zsh", "fish"] = option("bash, zsh or fish", positional=True)


def run(request: ShellCompletionRequest) -> int:
    sys.stdout.write(shellcode(["adlm"], shell=request.shell))
    return 0


def words_before_cursor() -> list[str]:
    """The arguments on the command line that the shell completes."""
    line, point = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "")
    return line[: int(point) if point.isdecimal() else None].split()[1:]


def print_completions(parser: argparse.ArgumentParser, command: str = "") -> None:
    """Print the possible next words and end the process. `parser` has the arguments of the command."""
    _set_completers(parser, command)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _set_completers(parser: argparse.ArgumentParser, command: str) -> None:
    """Options with choices complete themselves, and all others are files, as argcomplete does by default."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _set_completers(subparser, command)
        complete = {
            "overrides": lambda prefix, **_: _overrides(prefix, command),
            "sampler": lambda **_: list(SAMPLERS),
            "device": lambda **_: ["auto", "cuda", "cpu"],
        }.get(action.dest)
        if complete is not None:
            typed: Any = action  # argcomplete reads this attribute
            typed.completer = complete


def _overrides(prefix: str, command: str) -> Iterable[str]:
    """Presets and `option=`; after `option=`, the values that it can have, if they are names."""
    option, equals, _ = prefix.partition("=")
    if equals:
        values = [name.partition("/")[2] for name in preset_titles() if name.startswith(f"{option}/")]
        values += CORPORA if option == "data" else allowed_values(option) if option in descriptions() else ()
        return [f"{option}={value}" for value in values]
    options = [f"{name}=" for name in descriptions()]
    if command == "sample":
        return [name for name in options if name.startswith("sampling.")]
    return options if command == "quickstart" else [*preset_titles(), *options]
