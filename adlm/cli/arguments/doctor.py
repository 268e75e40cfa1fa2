"""The arguments of `adlm doctor`."""

import argparse

EXAMPLE = """adlm doctor
  adlm doctor --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description}\nThe exit code is 1 if something that adlm cannot work without is broken, else 0."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
