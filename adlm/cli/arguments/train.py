"""The arguments of `adlm train`."""

import argparse
from pathlib import Path

EXAMPLE = """adlm train own init=box data.path='texts/*.txt'
  adlm train --out runs/own train.steps=400
  adlm train owt/adlm model=small data.prepared=prepared/owt --out runs/adlm
  torchrun --nproc-per-node 8 -m adlm train owt/adlm train.micro_batch=32 --out runs/adlm
  adlm train --plot runs/adlm runs/mdlm"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="a preset or .yaml file, section=preset, or option=value, applied from left to right;\n"
        "init=box starts from the model in the box, init=RUN from another run;\n"
        "without a preset they change the run in --out: train.steps=2000 extends it; with none, it is resumed",
    )
    parser.add_argument(
        "--out", metavar="RUN", type=Path, help="run folder: a new one, or one to resume (default: runs/PRESET)"
    )
    parser.add_argument(
        "--plot",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="plot the curves of a run to curves.png and curves.svg in its folder;\n"
        "of several runs to comparison.png and comparison.svg in the first folder",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
