"""Models exported for `transformers`, in a folder or on the Hugging Face hub: config.json <-> Config, and weights.

Loading one executes nothing: the code in the folder is ignored, and our own network is built from its config.json.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from adlm.bases.description import folder_template
from adlm.checkpoints.model_folder import (
    ARCHITECTURE,
    CONFIG,
    WEIGHTS,
    ModelFolder,
    read_tokenizer,
    read_weights,
)
from adlm.config.load import from_mapping
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import read_json
from adlm.hub import MODEL_TYPE, check_model_type, is_hub_name
from adlm.methods import method_of
from adlm.methods.inputs import vocabulary_of

PREFIX = "network."  # the attribute of the exported model that holds the network
SECTIONS = ("model", "schedule", "time", "anchor", "sampling")  # the same in both configs
PUBLIC_DATA = ("name", "hub", "packing", "pad")  # options of `data` that name no path of a machine


def to_json(config: Config) -> dict[str, Any]:
    """The options of a model as an exported config.json holds them; `from_json` is the inverse."""
    method, vocabulary, options = method_of(config), vocabulary_of(config), asdict(config)
    return {
        "model_type": MODEL_TYPE,
        "method": config.method,
        "anchored": method.anchored,
        "causal": method.causal,
        "length": config.length,
        "vocab_size": vocabulary.size,
        "mask_token_id": vocabulary.mask_id,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
        "causal_weight": config.train.causal_weight,
        "tokenizer": public_name(config.tokenizer),
        "data": {option: options["data"][option] for option in PUBLIC_DATA},
        **{section: options[section] for section in SECTIONS},
    }


def from_json(raw: dict[str, Any]) -> Config:
    """The Config of an exported config.json; keys that `transformers` adds are ignored."""
    names = {"vocab_size": "size", **{f"{role}_token_id": f"{role}_id" for role in ("mask", "bos", "eos", "pad")}}
    options = {key: raw[key] for key in ("method", "length", "tokenizer", "data", *SECTIONS) if key in raw}
    if "causal_weight" in raw:
        options["train"] = {"causal_weight": raw["causal_weight"]}
    return from_mapping({**options, "vocabulary": {name: raw[key] for key, name in names.items() if key in raw}})


def public_name(path: str) -> str:
    """A name without folders of this machine: that of a hub repository unchanged, of a path the last part."""
    return path if is_hub_name(path) else Path(path).name


def is_exported(folder: Path) -> bool:
    """Whether a folder was written by `adlm export`, or saved by transformers from such a model."""
    path = folder / ARCHITECTURE
    raw = read_json(path) if path.is_file() and not (folder / CONFIG).is_file() else None
    return isinstance(raw, dict) and raw.get("model_type") == MODEL_TYPE


def load_exported(folder: Path) -> ModelFolder:
    """The content of an exported folder; also after fine-tuning and `save_pretrained` by transformers."""
    raw = check_model_type(folder / ARCHITECTURE, str(folder))
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder} has no {WEIGHTS}; save the model in one file of safetensors")
    try:
        config = from_json(raw)
    except UserError as error:
        raise UserError(f"{folder / ARCHITECTURE}: {error}") from None
    weights = read_weights(folder / WEIGHTS)
    foreign = next((name for name in weights if not name.startswith(PREFIX)), None)
    if foreign is not None:
        raise UserError(f"{folder / WEIGHTS}: weight {foreign} is unexpected; those of exported models begin {PREFIX}")
    named = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    return ModelFolder(config, named, read_tokenizer(folder, config), chat_template=folder_template(folder))
