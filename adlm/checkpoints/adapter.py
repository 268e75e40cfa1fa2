"""Adapter folders: adapter.safetensors + config.yaml, the weights that LoRA trained and the name of their base.

`init` of the config names the base, and `train.base_sha256` the checksum of its weights. The tokenizer is the base's
unless the folder has one. A loaded adapter is merged with its base: a model folder like any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from adlm.checkpoints.model_folder import (
    CONFIG,
    WEIGHTS,
    ModelFolder,
    check_fit,
    load_model_folder,
    read_tokenizer,
    read_weights,
    write_tensors,
)
from adlm.config.load import ADAPTER, BOX, base_folder, init_folder, load_config, save_config
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import file_sha256, read_bytes, replacing_folder
from adlm.methods import method_of
from adlm.methods.inputs import vocabulary_of
from adlm.models.lora import add_lora, merge, trained_parameters
from adlm.models.transformer import on_meta
from adlm.tokens import Tokenizer

CHECKSUM = "base.sha256"
"""In the folder of converted base weights: the checksum of the file they were read from."""


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter folder."""

    config: Config
    weights: dict[str, Tensor]
    """By the names of `lora.trained_parameters`."""
    tokenizer: Tokenizer | None
    """None where it is the base's."""


@dataclass(frozen=True)
class Base:
    """The frozen weights of an adapter."""

    name: str
    """As an adapter's config has it: a name of ours, or the path of a model folder."""
    folder: Path
    sha256: str
    tokenizer: Tokenizer | None


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER).exists()


def find_base(init: str) -> Base:
    """The base of a run with LoRA that starts from `init`: a model folder, or that of an adapter."""
    folder = init_folder(init)
    if is_adapter(folder):
        return _base_of(load_config(folder / CONFIG), folder)
    return _open_base(init if init == BOX else str(folder.resolve()), folder)


def _base_of(config: Config, folder: Path) -> Base:
    """The base that an adapter's config names; a user error unless it has the right checksum."""
    if not config.init or not config.train.lora_rank:
        raise UserError(f"{folder} has {ADAPTER}, but its {CONFIG} has no init and train.lora_rank; restore it")
    try:
        base = base_folder(config.init)
    except UserError as error:
        raise UserError(f"{folder} is an adapter, and its base is missing: {error}") from None
    found = _open_base(config.init, base)
    if found.sha256 != (needed := config.train.base_sha256):
        raise UserError(
            f"{folder} is an adapter for another base: {config.init} has sha256 {found.sha256[:16]}, and it needs "
            f"{needed[:16] or 'one that it does not name'}; restore the base it was trained from, or set init in its "
            f"{CONFIG} to the folder that has it"
        )
    return found


def _open_base(name: str, folder: Path) -> Base:
    recorded = folder / CHECKSUM
    sha256 = read_bytes(recorded).decode().strip() if recorded.is_file() else file_sha256(folder / WEIGHTS)
    return Base(name, folder, sha256, read_tokenizer(folder, load_config(folder / CONFIG)))


def read_adapter(folder: Path) -> Adapter:
    """User errors unless its weights are finite and exactly those that its config trains."""
    config = load_config(folder / CONFIG)
    if not config.train.lora_rank:
        raise UserError(f"{folder} has {ADAPTER}, but train.lora_rank in its {CONFIG} is 0; restore it")
    weights = read_weights(folder / ADAPTER)

    def build() -> nn.Module:
        network: nn.Module = method_of(config).build()
        add_lora_of(network, config)
        return network

    try:
        check_fit(trained_parameters(on_meta(build)), weights, config)
    except UserError as error:
        raise UserError(f"{folder / ADAPTER}: {error}") from None
    return Adapter(config, weights, read_tokenizer(folder, config))


def add_lora_of(network: nn.Module, config: Config) -> None:
    """`add_lora` with the options of a config."""
    train = config.train
    add_lora(network, train.lora_rank, train.lora_scale, vocabulary_of(config).mask_id, train.lora_norms)


def load_adapter(folder: Path) -> ModelFolder:
    """The model of an adapter folder: merged with its base, in float32."""
    base = _base_of(load_config(folder / CONFIG), folder)
    adapter, model = read_adapter(folder), load_model_folder(base.folder)
    config = adapter.config
    expected = on_meta(method_of(config).build).state_dict()
    new = {name: value for name, value in adapter.weights.items() if name in expected}  # trained in full
    try:
        check_fit(expected, {**model.weights, **new}, config)
    except UserError as error:
        raise UserError(f"{folder} does not fit its base {base.name}: {error}") from None
    weights = merge(model.weights, adapter.weights, config.train.lora_scale, vocabulary_of(config).mask_id)
    for name, value in weights.items():
        if not value.sum().isfinite() and not value.isfinite().all():
            raise UserError(f"{folder / ADAPTER}: weight {name} overflows when it is merged, so the adapter is broken")
    return ModelFolder(config, weights, adapter.tokenizer or model.tokenizer)


def replace_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter folder atomically, replacing an existing one; bfloat16 if `train.lora_dtype` asks for it."""
    weights: Mapping[str, Tensor] = adapter.weights
    if adapter.config.train.lora_dtype == "bfloat16":
        weights = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    with replacing_folder(folder) as part:
        write_tensors(weights, part / ADAPTER)
        save_config(adapter.config, part / CONFIG)
        if adapter.tokenizer is not None:
            adapter.tokenizer.save(part)


def merged_config(config: Config) -> Config:
    """The config of a model that was merged with its base: no adapter any more."""
    return replace(config, init="", train=replace(config.train, lora_rank=0, base_sha256=""))
