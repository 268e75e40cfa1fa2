"""The arguments of every command, one module each, imported without torch: help, completion and wrong usage are quick.

A module has EXAMPLE and add_arguments; the command itself is the module of the same name in adlm.cli, with run.
"""

import argparse


def add_subcommand(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, line: str, example: str
) -> argparse.ArgumentParser:
    """The parser of a command or subcommand: its line in the list of commands, its description, its example."""
    return subparsers.add_parser(
        name,
        help=line,
        description=f"{line[0].upper()}{line[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
