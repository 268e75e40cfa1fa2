"""The model that is fine-tuned: of the hub, a folder or a GGUF file, our own AR model, or new; and its model folder."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm.apps.reasoning.methods import reason_of
from adlm.apps.reasoning.network import CausalModel, HuggingFaceModel, OwnModel, resize_vocabulary
from adlm.apps.reasoning.rows import with_reasoning_tokens
from adlm.checkpoints.model_folder import (
    ARCHITECTURE,
    ModelFolder,
    load_model_folder,
    network_of,
    replace_model_folder,
)
from adlm.checkpoints.pretrained import load_pretrained, load_pretrained_model
from adlm.config.load import model_folder_at
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.tokens import Tokenizer, bpe_size, load_tokenizer, tokenizer_of_transformers, train_bpe
from adlm.training.seeds import seed_of


@dataclass(frozen=True)
class BaseModel:
    """A model to fine-tune, with the special tokens of reasoning."""

    config: Config
    """The run's config with `vocabulary`, `tokenizer` and, for our own models, `model` filled in."""
    tokenizer: Tokenizer
    network: CausalModel


def open_base(config: Config, texts: Callable[[], Iterable[str]]) -> BaseModel:
    """The model that `reason.base` names, or `model` from random weights; a bpe tokenizer is trained on `texts`."""
    base = reason_of(config).base
    if not base:
        size = bpe_size(config.tokenizer)
        plain = load_tokenizer(config.tokenizer) if size is None else train_bpe(texts(), size)
        return _new_model(config, with_reasoning_tokens(plain))
    folder = model_folder_at(Path(base))
    return _open_pretrained(config, base) if folder is None else _open_own(config, folder)


def _new_model(config: Config, tokenizer: Tokenizer) -> BaseModel:
    resolved = replace(config, vocabulary=tokenizer.vocabulary)
    torch.manual_seed(seed_of(config.train.seed, "weights"))
    return BaseModel(resolved, tokenizer, OwnModel(method_of(resolved).build()))  # type: ignore[arg-type]


def _open_pretrained(config: Config, base: str) -> BaseModel:
    theirs, model = load_pretrained(base, "AutoModelForCausalLM", "a causal language model")
    plain, network = tokenizer_of_transformers(base, theirs), HuggingFaceModel(model)
    tokenizer = with_reasoning_tokens(plain)
    resize_vocabulary(network, _num_symbols(plain), tokenizer.vocabulary.size)
    return BaseModel(replace(config, vocabulary=tokenizer.vocabulary, tokenizer=base), tokenizer, network)


def _open_own(config: Config, folder: Path) -> BaseModel:
    """A model folder of a plain causal method: as trained by `adlm train`, or fine-tuned before."""
    found = load_model_folder(folder)
    check_plain_causal(found.config, f"reason.base {folder} is a model of method {found.config.method}, which")
    plain, network = require_tokenizer(found, folder), reasoning_network(found, folder).requires_grad_(True)
    tokenizer = with_reasoning_tokens(plain)
    if tokenizer.vocabulary.size > plain.vocabulary.size:
        resize_vocabulary(network, _num_symbols(plain), tokenizer.vocabulary.size)
    resolved = replace(
        config, vocabulary=tokenizer.vocabulary, tokenizer=found.config.tokenizer, model=found.config.model
    )
    return BaseModel(resolved, tokenizer, network)


def check_plain_causal(config: Config, what: str) -> None:
    """A user error unless the network is one causal transformer: slots are read from left to right."""
    method = method_of(config)
    if not method.causal or method.anchored:
        raise UserError(f"{what} is not a single causal network; reasoning needs method=ar")


def require_tokenizer(found: ModelFolder, folder: Path) -> Tokenizer:
    if found.tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json, so it cannot read problems; give a model with one")
    return found.tokenizer


def _num_symbols(tokenizer: Tokenizer) -> int:
    """The symbols that a model knows: all but the mask, if our tokenizer has added it at the end."""
    vocabulary = tokenizer.vocabulary
    return vocabulary.size - (vocabulary.mask_id == vocabulary.size - 1)


def reasoning_network(found: ModelFolder, folder: Path) -> CausalModel:
    """The network of a model folder, in eval mode."""
    if (folder / ARCHITECTURE).is_file():
        return HuggingFaceModel(load_pretrained_model(str(folder), "AutoModelForCausalLM", "a causal language model"))
    return OwnModel(network_of(found.config, found.weights))


def save_reasoning_model(base: BaseModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write the model folder, replacing an existing one. `transformers` can load that of one of its models."""
    plain = {name.partition(".")[2]: value for name, value in weights.items()}  # without the name of the wrapper
    network = base.network
    architecture = _architecture(network.model) if isinstance(network, HuggingFaceModel) else None
    replace_model_folder(ModelFolder(base.config, plain, base.tokenizer, architecture), path)


def _architecture(model: Any) -> str:
    """The config.json of a model of `transformers`."""
    values = {**model.config.to_dict(), "dtype": "float32", "architectures": [type(model).__name__]}
    for local in ("quantization_config", "_name_or_path"):
        values.pop(local, None)
    return json.dumps(values, indent=1, default=str)
