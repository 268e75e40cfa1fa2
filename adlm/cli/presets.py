"""`adlm presets`: list the presets, or print one with overrides applied."""

import argparse
import json
import sys

from adlm.config.load import preset_titles, resolve, to_mapping, to_yaml
from adlm.config.options import descriptions
from adlm.errors import printable

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


def run(arguments: argparse.Namespace) -> int:
    if arguments.overrides:
        config = resolve(arguments.overrides)
        content = {"config": to_mapping(config), "meaning": descriptions()} if arguments.explain else to_mapping(config)
        text = f"{json.dumps(content)}\n" if arguments.json else printable(to_yaml(config, arguments.explain))
    elif arguments.json:
        text = f"{json.dumps(preset_titles())}\n"
    else:
        titles = preset_titles()
        width = max(map(len, titles))
        text = "".join(f"{name:{width}}  {title}\n" for name, title in titles.items())
    sys.stdout.write(text)
    return 0
