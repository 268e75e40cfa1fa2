"""Presets and overrides -> one checked Config, and back to YAML. Knows files and the schema, nothing of what knobs do.

The words of a command are read from left to right: a bare word is a preset or a .yaml file laid over what is there,
`section=name` lays that section's preset over the section, `a.b=c` sets one knob.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from adlm.config import knobs
from adlm.config.schema import SOURCES, Config
from adlm.errors import UserError
from adlm.files import read_bytes, write_file

Raw = dict[str, Any]

LARGEST_FILE = 2**18  # bytes; ours have 6,000, and YAML is read at some 300,000 a second

PRESETS = files("adlm") / "presets"


def resolve(words: Iterable[str], over: Config | None = None) -> Config:
    """The Config that the words of a command ask for, over the defaults or over another Config."""
    raw = parse_overrides(words)
    return from_mapping(raw if over is None else _laid_over(_without_source(to_mapping(over), raw), raw))


def is_run_preset(word: str) -> bool:
    """Whether a word of a command is a preset of a whole run: not a knob, a file, or a preset of one section."""
    return word in dict(_preset_files()) and word.partition("/")[0] not in knobs.sections()


def parse_overrides(words: Iterable[str]) -> Raw:
    """What the words of a command set and nothing else, unchecked: to be laid over knobs that are settled."""
    raw: Raw = {}
    whole = ""  # the preset that names a method: a run of its own, into which no other must leak
    for word in words:
        above = _asked(word)
        if "=" not in word and "method" in above:
            if whole:
                raise UserError(
                    f"{whole} and {word} are both whole runs, and one must not leak into the other; name one"
                )
            whole = word
        raw = _laid_over(_without_source(raw, above), above)
    return raw


def _without_source(raw: Raw, above: Raw) -> Raw:
    """What is there, without the text it reads where the next word names another: data.path replaces data.name.

    A prepared folder is text too: data.prepared replaces what a preset reads, and data.path a folder named before it.
    """
    below, over, sources = raw.get("data"), above.get("data"), (*SOURCES, "prepared")
    if not (isinstance(below, dict) and isinstance(over, dict) and any(over.get(knob) for knob in sources)):
        return raw
    return {**raw, "data": {knob: value for knob, value in below.items() if knob not in sources}}


def _asked(word: str) -> Raw:
    """What one word of a command sets."""
    if word.endswith((".yaml", ".yml")) and Path(word).exists():
        return _read_file(word)
    knob, equals, value = word.partition("=")
    section, slash, _ = knob.partition("/")
    if not equals:
        preset = _read_preset(word)
        return {section: preset} if slash and section in knobs.sections() else preset
    if knob in knobs.sections() and re.fullmatch(r"[A-Za-z][\w.-]*", value) and value != "null":
        if value.endswith((".yaml", ".yml")):
            return {knob: _read_file(value)}
        if f"{knob}/{value}" not in dict(_preset_files()) and f"{knob}.name" in knobs.descriptions():
            return {knob: {"name": value}}
        return {knob: _read_preset(f"{knob}/{value}")}
    if knob == "data" and "/" in value:
        raise UserError(f"data {value!r} is no corpus by name; your own text goes by data.path={value}")
    plain = value if knob in knobs.texts() else _parse(value, origin=f"{knob}={value}")
    return _nested(knob.split("."), plain)


def from_mapping(raw: Mapping[str, Any]) -> Config:
    """A plain mapping, as YAML gives it, checked key by key."""
    for knob, value in _leaves(raw):
        if complaint := knobs.unknown(knob):
            raise UserError(complaint)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{knob} {value} must be a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{knob} is a number of {value.bit_length()} bits; give one of at most 63")
    try:
        # through JSON, because there pydantic's strict mode takes a mapping for a record yet no "5" or true for a 5
        return TypeAdapter(Config).validate_json(json.dumps(raw, default=_plain), strict=True)
    except ValidationError as error:
        raise UserError(knobs.in_words(error)) from None


def validate(config: Config) -> Config:
    """The same Config, its types and ranges checked: for one that was made in Python."""
    return from_mapping(to_mapping(config))


def to_mapping(config: Config) -> Raw:
    """The Config as nested dicts; what is empty is None."""
    return dataclasses.asdict(config)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Knobs by their dotted names whose values are not the same, with both."""
    found: dict[str, tuple[Any, Any]] = {}
    for knob in dict.fromkeys((*before, *now)):
        was, is_now = before.get(knob), now.get(knob)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            found |= differences(was, is_now, f"{prefix}{knob}.")
        elif was != is_now:
            found[f"{prefix}{knob}"] = (was, is_now)
    return found


def to_yaml(config: Config, explain: bool = False) -> str:
    """The Config as YAML; with `explain`, each knob under its sentence from the schema."""
    text = yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=math.inf)
    return knobs.explained(text) if explain else text


def save_config(config: Config, path: Path) -> None:
    """Write the Config as YAML, whole or not at all."""
    title = f"# {config.method} on {config.data.name or 'own text'}, resolved: itself a preset\n"
    write_file(path, title + to_yaml(config))


def load_config(path: Path) -> Config:
    """A Config saved by `save`, or any .yaml of knobs."""
    return from_mapping(_read_file(str(path)))


def preset_titles() -> dict[str, str]:
    """Every preset shipped with the package, by name, with the sentence in its first line."""
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
        return _mapping(shipped[name].read_text(encoding="utf-8"), origin=name)
    if name in knobs.descriptions():
        raise UserError(f"knob {name} is given no value; write {name}=...")
    if not name.endswith((".yaml", ".yml")):
        raise UserError(f"there is no preset {name!r} (`adlm presets` lists them all){knobs.suggestion(name, shipped)}")
    return _read_file(name)


def _read_file(name: str) -> Raw:
    try:
        return _mapping(_content(Path(name)).decode(), origin=name)
    except UnicodeDecodeError:
        raise UserError(f"config file {name} cannot be read: it is not UTF-8 text") from None


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST_FILE)
    except UserError as error:
        raise UserError(f"config file {error}") from None


def _mapping(text: str, origin: str) -> Raw:
    raw = _parse(text, origin)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{origin} is not a mapping of knobs to values, such as `length: 1024`")
    return raw


class _Loader(yaml.SafeLoader):
    """YAML without surprises: 3e-4 is a number, 010 is none, off and no are words, nothing comes twice.

    Aliases and tags (`!!bool x`) are refused, dates are text. It is Python's own loader: that of libyaml is faster, but
    does not let these be refused, and ends the process where a file is nested too deeply.
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

    def whole_if_it_is(self, node: yaml.ScalarNode) -> int | float:
        """1e6 is a whole number, whatever YAML says."""
        number = self.construct_yaml_float(node)
        return int(number) if "e" in node.value.lower() and number.is_integer() and abs(number) < 2**53 else number


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.unique_keys)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.whole_if_it_is)
REPLACED = ("int", "float", "bool", "timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*\.?[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|\.(inf|nan))$"),
    list("-+0123456789."),
)


def _parse(text: str, origin: str) -> Any:
    named = origin if len(origin) < 200 else f"{origin[:200]}..."
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UserError(f"{named} cannot be read as YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None and "=" not in origin else ""
        raise UserError(f"{named} cannot be read as YAML: {problem}{line}") from None


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _nested(keys: list[str], value: Any) -> Raw:
    for key in reversed(keys[1:]):
        value = {key: value}
    return {keys[0]: value}


def _laid_over(below: Raw, above: Raw) -> Raw:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _laid_over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
