"""The arguments of `adlm quickstart`."""

import argparse
from pathlib import Path

EXAMPLE = """adlm quickstart --out runs/quickstart                       State of the Union speeches
  adlm quickstart data.path=book.txt --out runs/book           your own text"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="option=value for both models, such as train.steps=2000"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("runs/quickstart"),
        help="output folder (default: runs/quickstart)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
