"""Resolves presets and overrides into one validated Config, and writes it as YAML. Does not interpret the options.

Overrides are applied from left to right: a word without `=` is a preset or a .yaml file merged over the previous ones,
`section=name` merges a preset of that section, `a.b=c` sets one option, `init=MODEL` sets the options of a model.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from adlm.bases.description import describe_base, find_base, folder_template
from adlm.bases.named import BASE_NAMES, NAMED_BASES, named_base
from adlm.config import options
from adlm.config.schema import SOURCES, Config, Model, Sampling
from adlm.errors import UserError
from adlm.files import read_bytes, reporting_os_errors, write_file
from adlm.hub import is_hub_name
from adlm.registry import METHODS

Raw = dict[str, Any]

LARGEST_FILE = 2**18  # bytes; a resolved config has 6,000, and YAML is parsed at about 300,000 bytes a second

PRESETS = files("adlm") / "presets"
BOX, BOX_FOLDER = "box", Path(__file__).parents[1] / "box"
"""Name and folder of the small model that the package holds, the model in the box."""
MODEL_NAMES = (BOX, *NAMED_BASES, *BASE_NAMES)
"""Names that stand for a model; a folder of such a name is given as ./box."""
ADAPTER = "adapter.safetensors"
"""The weights in an adapter folder, which has no model.safetensors (`checkpoints/adapter.py`)."""
INHERITED = ("method", "length", "schedule", "model", "anchor", "sampling")  # what `init=MODEL` takes from the model

USES_OF_NETWORK = ("block_length", "masked_keys", "chain", "memory", "hole_id")  # options of `model` for any weights

_CONFIG = TypeAdapter(Config)


def resolve(words: Iterable[str], over: Config | None = None) -> Config:
    """The Config given by the overrides of a command, applied to the defaults or to the Config `over`."""
    raw = parse_overrides(words)
    return from_mapping(raw if over is None else merge(_without_source(to_mapping(over), raw), raw))


def is_run_preset(word: str) -> bool:
    """Whether an override is a preset of a complete run, not an option, a file, or a preset of some options."""
    return word in dict(_preset_files()) and "method" in _read_preset(word)


def parse_overrides(words: Iterable[str], with_networks: bool = True) -> Raw:
    """The options that the overrides of a command set, without defaults and not yet validated.

    With `with_networks` these include the options of the model that `init=MODEL` names, or one of our presets.
    """
    raw: Raw = {}
    run_preset = ""  # the preset that sets `method`; a second one would inherit options of the first
    words = list(words)
    others = [word for word in words if not word.startswith("init=")]
    num_before = next((number for number, word in enumerate(words) if word.startswith("init=")), 0)
    # `init=MODEL` directly after the last preset, so that options given before it hold too; recipes after it stay there
    ends = [
        number
        for number, word in enumerate(others, 1)
        if "=" not in word and not (number > num_before and word.startswith("recipe/"))
    ]
    end = max(ends, default=0)
    for word in [*others[:end], *(word for word in words if word.startswith("init=")), *others[end:]]:
        override = _parse_override(word)
        if with_networks and override.get("init") and (word.startswith("init=") or word in dict(_preset_files())):
            options_of_run = [other for other in others if "=" in other or other == word]
            override = merge(_init_options(override["init"], others, options_of_run), override)
        if "=" not in word and "method" in override:
            if run_preset:
                raise UserError(
                    f"{run_preset} and {word} are both presets of complete runs and cannot be combined; give one"
                )
            run_preset = word
        raw = merge(_without_source(raw, override), override)
    return raw


def _without_source(raw: Raw, override: Raw) -> Raw:
    """`raw` without its text source if `override` sets another one: data.path replaces data.name.

    A prepared folder counts as a source: data.prepared replaces the source of a preset, and data.path replaces an
    earlier data.prepared.
    """
    below, above, sources = raw.get("data"), override.get("data"), (*SOURCES, "prepared")
    if not (isinstance(below, dict) and isinstance(above, dict) and any(above.get(option) for option in sources)):
        return raw
    return {**raw, "data": {option: value for option, value in below.items() if option not in sources}}


def _parse_override(word: str) -> Raw:
    """The options that one override sets."""
    if word.endswith((".yaml", ".yml")) and Path(word).exists():
        return _read_file(word)
    option, equals, value = word.partition("=")
    section, slash, _ = option.partition("/")
    if not equals:
        preset = _read_preset(word)
        return {section: preset} if slash and section in options.sections() else preset
    is_name = f"{option}/{value}" in dict(_preset_files()) or re.fullmatch(r"\w*[A-Za-z][\w.-]*", value)
    if option in options.sections() and is_name and value != "null":
        if value.endswith((".yaml", ".yml")):
            return {option: _read_file(value)}
        if f"{option}/{value}" not in dict(_preset_files()) and f"{option}.name" in options.descriptions():
            return {option: {"name": value}}
        return {option: _read_preset(f"{option}/{value}")}
    if option == "data" and "/" in value:
        raise UserError(f"data {value!r} is not the name of a corpus; your own text goes by data.path={value}")
    if not value and option in options.descriptions() and option not in options.string_options():
        raise UserError(f"option {option} has no value; write {option}=...")
    plain: Any = value if option in options.string_options() else _parse_yaml(value, origin=f"{option}={value}")
    first, *rest = option.split(".")
    for key in reversed(rest):
        plain = {key: plain}
    return {first: plain}


def _init_options(model: str, words: list[str], options_of_run: list[str]) -> Raw:
    """What `init=MODEL` sets: the options of the model's network, its tokenizer, and those of a recipe.

    The recipe is recipe/fine-tune for a model folder, recipe/lora for an adapter and for a base that has a name, and
    recipe/adapt for any other pretrained base. `words` are all overrides, which choose the method of a base, and
    `options_of_run` those without presets of other networks.
    """
    folder = init_folder(model)
    if folder is None:
        recipe = _read_preset("recipe/lora" if model in MODEL_NAMES else "recipe/adapt")
        return {"init": model, **_base_options(model, words, options_of_run), **recipe}
    config = load_config(folder / "config.yaml")
    raw = to_mapping(config)
    time = {option: raw["time"][option] for option in ("steps", "sigma")}  # discrete or continuous
    recipe, tokenizer = _read_preset("recipe/fine-tune"), BOX if model == BOX else str(folder)
    if (folder / ADAPTER).exists():
        lora = {option: value for option, value in raw["train"].items() if option.startswith("lora_")}
        recipe = merge(_read_preset("recipe/lora"), {"train": lora})
        recipe["length"] = min(recipe["length"], config.length)
        if not (folder / "tokenizer.json").exists():
            tokenizer = _base_tokenizer(config.init)
    if config.model.block_length:  # what its samplers need, and the times that suit blocks
        time |= {option: raw["time"][option] for option in ("t_min", "t_max")}
        kept_options = ("causal_weight", "chain_weight", "chain_target", "random_blocks")
        kept = {option: raw["train"][option] for option in kept_options}
        recipe = merge(recipe, {"train": kept})
    own = {"init": model, "tokenizer": tokenizer, "time": time}
    return {**{option: raw[option] for option in INHERITED}, **own, **recipe}


def _base_tokenizer(name: str) -> str:
    """The option `tokenizer` for the tokenizer of an adapter's base."""
    folder = None if name in NAMED_BASES else init_folder(name)
    return f"base:{name}" if folder is None else BOX if name == BOX else str(folder)


def _base_options(model: str, words: list[str], options_of_run: list[str]) -> Raw:
    """Tokenizer, length and network of a pretrained base. For an anchored method its upper blocks are the denoiser."""
    path = find_base(model)
    assert path is not None, "see init_folder"
    base, given = describe_base(path), parse_overrides(words, with_networks=False)
    defaults = {option: value for option, value in dataclasses.asdict(Model()).items() if option not in USES_OF_NETWORK}
    network, method = {**defaults, **base.model}, given.get("method", Config.method)
    if isinstance(method, str) and method in METHODS and METHODS[method].anchored:
        own = parse_overrides(options_of_run, with_networks=False).get("model")
        own, total = own if isinstance(own, dict) else {}, base.model["blocks"]
        lower, upper = own.get("blocks"), own.get("denoiser_blocks")
        if isinstance(lower, int):
            upper = total - lower
        upper = upper if isinstance(upper, int) else total // 3
        if not 0 <= upper < total:
            raise UserError(f"init {model} has {total} blocks; give model.blocks from 1 to {total}", "model.blocks")
        network |= {"blocks": total - upper, "denoiser_blocks": upper, "bridge": "none"}
        network["tie_heads"] = upper > 0 and not network["tie_embedding"]
    length = given.get("length", min(Config.length, base.max_length))
    return {"tokenizer": f"base:{model}", "length": length, "model": network}


def model_source(path: str | Path) -> Path:
    """Where a model is: its folder, also that in a run or of the name `box`, a .ckpt file, or a pretrained .gguf file.

    smollm2 is the adapter in the box, or the base itself if the box has none; smollm2-base is always the base. A name
    on the hub, owner/name, is returned as it is. What is none of these is a user error.
    """
    source = BOX_FOLDER if path == BOX else Path(path)
    if path in BASE_NAMES:
        return named_base(BASE_NAMES[str(path)])
    if path in NAMED_BASES:
        source, base = BOX_FOLDER / path, named_base(str(path))  # both need the base
        if not (source / ADAPTER).is_file():
            return base
    with reporting_os_errors(source, f"{path} cannot be read"):
        if source.is_dir():
            return source / "model" if (source / "model").is_dir() else source
        exists = source.exists()
    if source.suffix == ".ckpt" or (exists and source.suffix == ".gguf") or (not exists and is_hub_name(str(path))):
        return source
    absent = "" if exists else ": there is nothing of that name"
    remedy = "give a run folder such as runs/own, a model folder, or box, the small model that comes with adlm"
    meant = "" if exists else options.suggestion(str(path), MODEL_NAMES)
    raise UserError(f"{path} is neither a model folder nor a .ckpt file{absent}; {remedy}{meant}")


def init_folder(model: str) -> Path | None:
    """The model folder that the option `init` names; None if it is a pretrained base; a user error if it is neither."""
    with suppress(UserError):
        folder = model_folder_at(model_source(model))
        if folder is not None and any((folder / name).is_file() for name in ("model.safetensors", ADAPTER)):
            return folder
    if find_base(model) is not None:
        return None
    raise UserError(
        f"init {model} is neither {BOX}, the model in the box, nor a run or model folder of adlm, nor a pretrained "
        "model: a .gguf file, a folder with config.json, or owner/name on the hub"
        f"{options.suggestion(model, MODEL_NAMES)}"
    )


def init_template(model: str) -> str | None:
    """The chat template of the model that the option `init` names, if it has one; an adapter may have that of its base.

    A name of NAMED_BASES is that of an adapter in the box too; in the config of an adapter it is the base.
    """
    folder = init_folder(model)
    if folder is not None:
        template = folder_template(folder)
        if template is not None or not (folder / ADAPTER).exists():
            return template
        model = load_config(folder / "config.yaml").init
        if model not in NAMED_BASES:
            return init_template(model)
    path = find_base(model)
    return None if path is None else describe_base(path).chat_template


def model_folder_at(path: Path) -> Path | None:
    """The model folder of a run, or the path itself if it is one; None if it is neither."""
    return next((folder for folder in (path / "model", path) if (folder / "config.yaml").is_file()), None)


def from_mapping(raw: Mapping[str, Any]) -> Config:
    """The Config of a nested mapping as read from YAML, with names, types and ranges validated."""
    for option, value in _leaves(raw):
        if message := options.unknown_option_error(option):
            raise UserError(message, option)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{option} {value} must be a finite number", option)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{option} is a number of {value.bit_length()} bits; give one of at most 63", option)
        names = options.registries().get(option)
        if names is not None and isinstance(value, str) and value not in names:
            raise UserError(options.unknown_choice_error(option, value, names), option)
    try:
        # via JSON: pydantic's strict mode then accepts a mapping for a dataclass, but not "5" or true for an int
        # a NumPy or PyTorch scalar is its number, any other object its string
        text = json.dumps(raw, default=lambda value: value.item() if hasattr(value, "item") else str(value))
        return _CONFIG.validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(options.describe_validation_error(error), options.invalid_option(error)) from None


def validate(config: Config) -> Config:
    """The same Config after validation of types and ranges, for a Config constructed in Python."""
    return from_mapping(to_mapping(config))


def validate_sampling(sampling: Sampling) -> Sampling:
    """The same sampling options after validation, for options given in Python."""
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling must be an adlm.config.schema.Sampling, not a {type(sampling).__name__}", "sampling")
    return from_mapping({"sampling": dataclasses.asdict(sampling)}).sampling


def to_mapping(config: Config) -> Raw:
    """The Config as nested dicts."""
    return dataclasses.asdict(config)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The options whose values differ, by dotted name, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for option in dict.fromkeys((*before, *now)):
        old, new = before.get(option), now.get(option)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{option}.")
        elif old != new:
            found[f"{prefix}{option}"] = (old, new)
    return found


def to_yaml(config: Config, explain: bool = False) -> str:
    """The Config as YAML; with `explain`, each option has its description in a comment above it."""
    text = yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=math.inf)
    return options.add_descriptions(text) if explain else text


def save_config(config: Config, path: Path) -> None:
    """Write the Config as YAML, atomically. The file can be used as a preset."""
    title = f"# {config.method} on {config.data.name or 'own text'}, resolved: itself a preset\n"
    write_file(path, title + to_yaml(config))


def load_config(path: Path) -> Config:
    """Read a Config saved by `save_config`, or any other .yaml file of options."""
    raw = _read_file(str(path))
    for option, value in _leaves(raw):
        names = options.registries().get(option)
        if names is not None and isinstance(value, str) and value not in names:
            raise UserError(
                f"{path}: {names.kind} {value!r} is neither built in nor of an installed package; install the package "
                f"that provides it, by an entry point in {names.group}{options.suggestion(value, names)}"
            )
    try:
        return from_mapping(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}", error.option) from None


def preset_titles() -> dict[str, str]:
    """Every preset shipped with the package, by name, with its title: the comment in its first line."""
    return {
        name: source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for name, source in _preset_files()
    }


def _preset_files(folder: Traversable = PRESETS, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _preset_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield f"{prefix}{entry.name.removesuffix('.yaml')}", entry


def _read_preset(name: str) -> Raw:
    shipped = dict(_preset_files())
    if name in shipped:
        return _parse_mapping(shipped[name].read_text(encoding="utf-8"), origin=name)
    if name in options.descriptions():
        raise UserError(f"option {name} has no value; write {name}=...")
    if not name.endswith((".yaml", ".yml")):
        remedy = options.suggestion(name, shipped)
        if os.path.isfile(os.path.join(name, "config.yaml")):
            remedy = f"; a run is resumed by `adlm train --out {name}`"
        elif os.path.exists(name):
            remedy = f"; to read it as text, write data.path={name}"
        raise UserError(f"there is no preset {name!r} (`adlm presets` lists them all){remedy}")
    return _read_file(name)


def _read_file(name: str) -> Raw:
    try:
        content = read_bytes(Path(name), LARGEST_FILE)
    except UserError as error:
        raise UserError(f"config file {error}") from None
    try:
        return _parse_mapping(content.decode(), origin=name)
    except UnicodeDecodeError:
        raise UserError(f"config file {name} cannot be read: it is not UTF-8 text") from None


def _parse_mapping(text: str, origin: str) -> Raw:
    raw = _parse_yaml(text, origin)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{origin} is not a mapping of options to values, such as `length: 1024`")
    return raw


class _Loader(yaml.SafeLoader):
    """A strict YAML loader: 3e-4 is a number; 010, off, no and dates are strings; duplicate keys are an error.

    Aliases and tags (`!!bool x`) are errors too. It extends the loader written in Python, because the faster libyaml
    loader cannot reject these and crashes the process on deeply nested files.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed; write the value out")
        scalar_or_collection = self.check_event(yaml.ScalarEvent, yaml.CollectionStartEvent)
        tag = self.peek_event().tag if scalar_or_collection else None  # type: ignore[no-untyped-call]
        if tag is not None:
            raise yaml.YAMLError(f"tags ({tag.replace('tag:yaml.org,2002:', '!!')}) are not allowed; write the value")
        return super().compose_node(parent, index)

    def unique_keys(self, node: yaml.MappingNode) -> Raw:
        mapping: Raw = {}
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in mapping:
                raise yaml.YAMLError(f"{key} is set twice, again on line {key_node.start_mark.line + 1}; keep one")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def int_or_float(self, node: yaml.ScalarNode) -> int | float:
        """1e6 is an int here, and a float in YAML."""
        number = self.construct_yaml_float(node)
        return int(number) if "e" in node.value.lower() and number.is_integer() and abs(number) < 2**53 else number


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.unique_keys)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.int_or_float)
REPLACED_TYPES = ("int", "float", "bool", "timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in REPLACED_TYPES]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*\.?[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|\.(inf|nan))$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str, origin: str) -> Any:
    shown = origin if len(origin) < 200 else f"{origin[:200]}..."
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UserError(f"{shown} cannot be read as YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None and "=" not in origin else ""
        raise UserError(f"{shown} cannot be read as YAML: {problem}{line}") from None


def merge(below: Raw, above: Raw) -> Raw:
    """A recursive merge of two nested mappings; values of `above` take precedence."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
