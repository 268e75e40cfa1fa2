"""`adlm presets`: list the presets, or print one with overrides applied."""

import json
import sys
from dataclasses import dataclass

from adlm.config.load import preset_titles, resolve, to_mapping, to_yaml
from adlm.config.options import descriptions
from adlm.errors import printable
from adlm.request import Request, option


@dataclass(frozen=True)
class PresetsRequest(Request):
    """The options of `adlm presets`."""

    example = "adlm presets owt/adlm model=medium train.steps=500000 --explain"

    overrides: tuple[str, ...] = option(
        "a preset or .yaml file, section=preset, or option=value, applied from left to right;\n"
        "without any, list the presets",
        (),
        positional=True,
    )
    explain: bool = option("print the description of each option above it", False)
    json: bool = option("print JSON; with --explain the keys are config and meaning", False)


def run(request: PresetsRequest) -> int:
    if request.overrides:
        config = resolve(request.overrides)
        content = {"config": to_mapping(config), "meaning": descriptions()} if request.explain else to_mapping(config)
        text = f"{json.dumps(content)}\n" if request.json else printable(to_yaml(config, request.explain))
    elif request.json:
        text = f"{json.dumps(preset_titles())}\n"
    else:
        titles = preset_titles()
        width = max(map(len, titles))
        text = "".join(f"{name:{width}}  {title}\n" for name, title in titles.items())
    sys.stdout.write(text)
    return 0
