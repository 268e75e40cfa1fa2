"""The arguments of `adlm parity`."""

import argparse
from pathlib import Path

EXAMPLE = "adlm parity tests/parity/golden"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder with golden.json, its .npz arrays and .ckpt weights"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
