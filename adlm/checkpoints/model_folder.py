"""A model as people keep and share it: model.safetensors + config.yaml + tokenizer.json. Knows nothing of training.

A folder appears whole or not at all. Nothing in it can run code: safetensors and YAML of plain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adlm.config.load import load_config, save_config
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import refuse_taken, replacing_folder
from adlm.methods import method_of
from adlm.models.meta import on_meta
from adlm.tokens import Tokenizer, load_tokenizer

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.yaml", "tokenizer.json"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WEIGHTS_OF_A_BLOCK = 6  # at the least


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds; without a tokenizer it serves ids."""

    config: Config
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | None = None


def save_model_folder(model: ModelFolder, folder: Path) -> None:
    """Write the folder, whole or not at all, where there is none."""
    refuse_taken(folder)
    replace_model_folder(model, folder)


def replace_model_folder(model: ModelFolder, folder: Path) -> None:
    """Write the folder in place of an older one; the caller knows that it may be replaced."""
    with replacing_folder(folder) as part:
        weights = {name: value.detach().contiguous() for name, value in model.weights.items()}
        try:
            save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{folder} cannot be written: {error}") from None
        (part / WEIGHTS).chmod(0o644)  # safetensors makes it readable for its owner alone
        save_config(model.config, part / CONFIG)
        if model.tokenizer is not None:
            model.tokenizer.save(part)


def load_model_folder(folder: Path) -> ModelFolder:
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}, so it is not a model folder")
    config = load_config(folder / CONFIG)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError, ValueError, AttributeError) as error:  # the last: a dtype that torch has not
        raise UserError(f"{folder / WEIGHTS} cannot be read as safetensors: {error}") from None
    _check_weights(weights, folder / WEIGHTS)
    tokenizer = load_tokenizer(str(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else None
    if tokenizer is not None and config.vocabulary is not None and tokenizer.vocabulary.size != config.vocabulary.size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary.size} symbols, "
            f"and vocabulary.size is {config.vocabulary.size}"
        )
    return ModelFolder(config, weights, tokenizer)


def _check_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Weights are real numbers of one dtype, all of them finite."""
    for name, value in weights.items():
        if value.dtype not in DTYPES:
            known = ", ".join(map(_name, DTYPES))
            raise UserError(f"{path}: weight {name} is made of {_name(value.dtype)}, and a network of one of {known}")
        # A sum is 25 times as fast as looking at every number (0.08 s for 240M weights); it may overflow, though.
        if not value.sum().isfinite() and not value.isfinite().all():
            raise UserError(f"{path}: weight {name} holds a NaN or an infinity, so the model is broken")
    kinds = sorted({_name(value.dtype) for value in weights.values()})
    if len(kinds) > 1:
        raise UserError(f"{path} mixes weights of {' and '.join(kinds)}; save them all in one of these")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def network_of(config: Config, weights: Mapping[str, Tensor]) -> Any:
    """The network of a Config with the weights in it, every one of them used; ready to be asked, not to be trained."""
    method = method_of(config)
    second = config.model.num_denoiser_blocks if any(name.startswith("denoiser.") for name in weights) else 0
    if (config.model.blocks + second) * WEIGHTS_OF_A_BLOCK > len(weights):
        raise UserError(
            f"model.blocks {config.model.blocks} with model.denoiser_blocks {config.model.num_denoiser_blocks} do not "
            f"fit: there are {len(weights)} weights, and a block has at least {WEIGHTS_OF_A_BLOCK}"
        )
    network: Any = on_meta(method.build)
    wanted = network.state_dict()
    for name in sorted(wanted.keys() ^ weights.keys()):
        excess = "is missing" if name in wanted else "is one too many"
        raise UserError(f"weight {name} {excess} for method {config.method} of the sizes that the config gives")
    for name, value in wanted.items():
        if value.shape != weights[name].shape:
            raise UserError(f"weight {name} has shape {tuple(weights[name].shape)}, and {tuple(value.shape)} would fit")
    network.load_state_dict(dict(weights), assign=True)
    return network.eval().requires_grad_(False)
