"""The arguments of `adlm export`."""

import argparse
from pathlib import Path

EXAMPLE = "adlm export runs/own --to hf --out exported/own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        default="box",
        help="a model folder or run folder of method adlm, mdlm, ar or a2r\n"
        "(default: box, the small model that comes with adlm)",
    )
    add("--to", choices=("hf",), default="hf", help="the format: hf, a folder for transformers (default: hf)")
    add("--out", metavar="FOLDER", type=Path, required=True, help="the folder to create")
    add("--force", action="store_true", help="replace the folder of --out if it is an earlier export")
    add("--push", metavar="OWNER/NAME", help="also upload the folder to this repository on the Hugging Face hub")
    add("--private", action="store_true", help="create the repository of --push as a private one")
    add("--json", action="store_true", help="print JSON")
