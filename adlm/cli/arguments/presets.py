"""The arguments of `adlm presets`."""

import argparse

EXAMPLE = "adlm presets owt/adlm model=medium train.steps=500000 --explain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="a preset or .yaml file, section=preset, or option=value, applied from left to right;\n"
        "without any, list the presets",
    )
    parser.add_argument("--explain", action="store_true", help="print the description of each option above it")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; with --explain the keys are config and meaning"
    )
