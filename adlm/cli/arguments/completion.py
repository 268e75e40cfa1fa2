"""The arguments of `adlm completion`."""

import argparse

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """adlm completion bash > ~/.local/share/bash-completion/completions/adlm
  adlm completion zsh > ~/.zfunc/_adlm         with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  adlm completion fish > ~/.config/fish/completions/adlm.fish
  eval "$(adlm completion bash)"               for this shell only

Create the folder first if it does not exist, and open a new shell. The script asks adlm for the words, so it need not
be written again after an update."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
