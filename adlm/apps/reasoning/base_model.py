"""The model that is fine-tuned: of the hub, a folder or a GGUF file, our own AR model, or new; and its model folder."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
        tokenizer = with_reasoning_tokens(
            load_tokenizer(config.tokenizer) if size is None else train_bpe(texts(), size)
        )
        resolved = replace(config, vocabulary=tokenizer.vocabulary)
        torch.manual_seed(seed_of(config.train.seed, "weights"))
        return BaseModel(resolved, tokenizer, OwnModel(method_of(resolved).build()))  # type: ignore[arg-type]
    folder = model_folder_at(Path(base))
    network: CausalModel
    if folder is None:
        theirs, model = load_pretrained(base, "AutoModelForCausalLM", "a causal language model")
        plain, network = tokenizer_of_transformers(base, theirs), HuggingFaceModel(model)
        resolved = replace(config, tokenizer=base)
    else:  # as trained by `adlm train`, or fine-tuned before
        found, plain, network = load_reasoning_model(folder)
        check_plain_causal(found, f"reason.base {folder} is a model of method {found.method}, which")
        network.requires_grad_(True)
        resolved = replace(config, tokenizer=found.tokenizer, model=found.model)
    tokenizer = with_reasoning_tokens(plain)
    size, has_mask_last = plain.vocabulary.size, plain.vocabulary.mask_id == plain.vocabulary.size - 1
    if folder is None or tokenizer.vocabulary.size > size:
        resize_vocabulary(network, size - has_mask_last, tokenizer.vocabulary.size)  # a mask that we added is not known
    return BaseModel(replace(resolved, vocabulary=tokenizer.vocabulary), tokenizer, network)


def check_plain_causal(config: Config, what: str) -> None:
    """A user error unless the network is one causal transformer: slots are read from left to right."""
    method = method_of(config)
    if not method.causal or method.anchored:
        raise UserError(f"{what} is not a single causal network; reasoning needs method=ar")


def load_reasoning_model(folder: Path) -> tuple[Config, Tokenizer, CausalModel]:
    """Config, tokenizer and network (in eval mode, without gradients) of a model folder."""
    found = load_model_folder(folder)
    if found.tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json, so it cannot read problems; give a model with one")
    if (folder / ARCHITECTURE).is_file():
        model = load_pretrained_model(str(folder), "AutoModelForCausalLM", "a causal language model")
        return found.config, found.tokenizer, HuggingFaceModel(model).requires_grad_(False)
    return found.config, found.tokenizer, OwnModel(network_of(found.config, found.weights))


def save_reasoning_model(base: BaseModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write the model folder, replacing an existing one. `transformers` can load that of one of its models."""
    plain = {name.partition(".")[2]: value for name, value in weights.items()}  # without the name of the wrapper
    architecture = None
    if isinstance(base.network, HuggingFaceModel):
        model = base.network.model
        values = {**model.config.to_dict(), "dtype": "float32", "architectures": [type(model).__name__]}
        for local in ("quantization_config", "_name_or_path"):
            values.pop(local, None)
        architecture = json.dumps(values, indent=1, default=str)
    replace_model_folder(ModelFolder(base.config, plain, base.tokenizer, architecture), path)
