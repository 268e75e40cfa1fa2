"""`adlm presets`: what ships with the package, and what a preset with overrides comes to."""

import argparse
import json
import sys

from adlm.config.knobs import descriptions
from adlm.config.load import preset_titles, resolve, to_mapping, to_yaml
from adlm.errors import printable

EXAMPLE = "adlm presets owt/adlm model=medium train.steps=500000 --explain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a preset or .yaml file, section=preset, or knob=value; read from left to right.\nwithout any, list them",
    )
    parser.add_argument("--explain", action="store_true", help="write each knob's meaning above it")
    parser.add_argument(
        "--json", action="store_true", help="for machines; with --explain the keys are config and meaning"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.words:
        config = resolve(arguments.words)
        told = {"config": to_mapping(config), "meaning": descriptions()} if arguments.explain else to_mapping(config)
        text = f"{json.dumps(told)}\n" if arguments.json else printable(to_yaml(config, arguments.explain))
    elif arguments.json:
        text = f"{json.dumps(preset_titles())}\n"
    else:
        titles = preset_titles()
        width = max(map(len, titles))
        text = "".join(f"{name:{width}}  {title}\n" for name, title in titles.items())
    sys.stdout.write(text)
    return 0
