"""`adlm presets`: list the presets, or print one with overrides applied."""

import argparse
import json
import sys

from adlm.config.load import preset_titles, resolve, to_mapping, to_yaml
from adlm.config.options import descriptions
from adlm.errors import printable


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
