"""Adapter folders: adapter.safetensors + config.yaml, the weights that LoRA trained and the name of their base.

`init` of the config names the base, and `train.base_sha256` the checksum of its weights. Tokenizer and chat
template are the base's unless the folder has its own. A loaded adapter is merged with its base: a model folder like any
other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from adlm.bases.description import TEMPLATE, folder_template
from adlm.bases.named import NAMED_BASES
from adlm.checkpoints.base_weights import Base, check_base_files, read_base
from adlm.checkpoints.model_folder import (
    CONFIG,
    WEIGHTS,
    ModelFolder,
    check_fit,
    check_safetensors,
    load_model_folder,
    read_tokenizer,
    read_weights,
)
from adlm.checkpoints.tensor_files import FullTensor, on_cpu, write_tensors
from adlm.config.load import ADAPTER, BOX, init_folder, load_config, save_config
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.files import file_sha256, replacing_folder, write_file
from adlm.methods import method_of
from adlm.methods.inputs import vocabulary_of
from adlm.models.lora import add_lora, merge, trained_parameters
from adlm.models.transformer import on_meta
from adlm.tokens import Tokenizer


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter folder."""

    config: Config
    weights: Mapping[str, Tensor]
    """By the names of `lora.trained_parameters`."""
    tokenizer: Tokenizer | None
    """None where it is the base's."""
    chat_template: str | None = None
    """None where it is the base's, or that has none either."""


@dataclass(frozen=True)
class LoraBase:
    """The model whose weights LoRA leaves frozen."""

    name: str
    """As an adapter's config has it: a name, or the path of a file or folder."""
    sha256: str
    model: ModelFolder | Base


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER).exists()


def base_of_run(init: str) -> LoraBase:
    """The base of a run with LoRA that starts from `init`: that model, or if it is an adapter, the adapter's base."""
    folder = init_folder(init)
    if folder is not None and is_adapter(folder):
        return _base_of_adapter(load_config(folder / CONFIG), folder)
    return _open_base(init)


def _open_base(name: str) -> LoraBase:
    """The base that an adapter names. A name of NAMED_BASES is that of an adapter in the box too, but not here."""
    folder = None if name in NAMED_BASES else init_folder(name)
    is_path = name != BOX and name not in NAMED_BASES and Path(name).exists()
    lasting = str(Path(name).resolve()) if is_path else name  # valid in any folder
    if folder is None:
        base = read_base(name)
        return LoraBase(lasting, base.sha256, base)
    if is_adapter(folder):
        raise UserError(f"init {name} is itself an adapter; give the model that it was trained from")
    return LoraBase(lasting, file_sha256(folder / WEIGHTS), load_model_folder(folder))


def _base_of_adapter(config: Config, folder: Path) -> LoraBase:
    """The base that an adapter's config names; a user error unless it has the right checksum."""
    try:
        base = _open_base(config.init)
    except UserError as error:
        raise UserError(f"{folder} is an adapter, and its base cannot be used: {error}") from None
    if base.sha256 != (needed := config.train.base_sha256):
        raise UserError(
            f"{folder} is an adapter for another base: {config.init} has sha256 {base.sha256[:16]}, and it needs "
            f"{needed[:16] or 'one that it does not name'}; restore the base it was trained from, or set init in its "
            f"{CONFIG} to the folder that has it"
        )
    return base


def check_files_of(init: str) -> None:
    """A user error if the weights of the model that `init` names are cut off; opens their files, and reads none."""
    folder = init_folder(init)
    if folder is None:
        check_base_files(init)
        return
    for name in (WEIGHTS, ADAPTER):
        if (folder / name).is_file():
            check_safetensors(folder / name)


def open_model(init: str) -> ModelFolder | Base:
    """The model that `init` names: a model folder, an adapter merged with its base, or a pretrained base."""
    folder = init_folder(init)
    return read_base(init) if folder is None else load_model_folder(folder)


def initial_weights(model: ModelFolder | Base, config: Config) -> Mapping[str, Tensor]:
    """The weights of a model for the network of a config that starts from it."""
    if isinstance(model, ModelFolder):
        return model.weights
    if config.length > model.max_length:
        raise UserError(f"length {config.length} is more than the {model.max_length} tokens that {model.name} reads")
    return model.weights_for(config, method_of(config).anchored)


def read_adapter(folder: Path) -> Adapter:
    """User errors unless its weights are finite and exactly those that its config trains."""
    config = load_config(folder / CONFIG)
    if not config.init or not config.train.lora_rank:
        raise UserError(f"{folder} has {ADAPTER}, but its {CONFIG} has no init and train.lora_rank; restore it")
    weights = read_weights(folder / ADAPTER)

    def build() -> nn.Module:
        network: nn.Module = method_of(config).build()
        add_lora_of(network, config)
        return network

    try:
        check_fit(trained_parameters(on_meta(build)), weights, config)
    except UserError as error:
        raise UserError(f"{folder / ADAPTER}: {error}") from None
    return Adapter(config, weights, read_tokenizer(folder, config), folder_template(folder))


def add_lora_of(network: nn.Module, config: Config) -> None:
    """`add_lora` with the options of a config."""
    train = config.train
    add_lora(network, train.lora_rank, train.lora_scale, vocabulary_of(config).mask_id, train.lora_norms)


def load_adapter(folder: Path) -> ModelFolder:
    """The model of an adapter folder: merged with its base, in float32."""
    adapter = read_adapter(folder)
    config = adapter.config
    base = _base_of_adapter(config, folder)
    expected = on_meta(method_of(config).build).state_dict()
    new = {name: value for name, value in adapter.weights.items() if name in expected}  # trained in full
    try:
        frozen = initial_weights(base.model, config)
        check_fit(expected, {**frozen, **new}, config)
    except UserError as error:
        raise UserError(f"{folder} does not fit its base {base.name}: {error}") from None
    weights = merge(frozen, adapter.weights, config.train.lora_scale, vocabulary_of(config).mask_id)
    for name, value in weights.items():
        if not value.sum().isfinite() and not value.isfinite().all():
            raise UserError(f"{folder / ADAPTER}: weight {name} overflows when it is merged, so the adapter is broken")
    template = adapter.chat_template or base.model.chat_template
    return ModelFolder(config, weights, adapter.tokenizer or base.model.tokenizer, chat_template=template)


def replace_adapter(adapter: Adapter, folder: Path, full_tensor: FullTensor = on_cpu) -> None:
    """Write an adapter folder atomically, replacing an existing one; bfloat16 if `train.lora_dtype` asks for it."""
    dtype = torch.bfloat16 if adapter.config.train.lora_dtype == "bfloat16" else None
    with replacing_folder(folder) as part:
        write_tensors(adapter.weights, part / ADAPTER, dtype=dtype, full_tensor=full_tensor)
        save_config(adapter.config, part / CONFIG)
        if adapter.tokenizer is not None:
            adapter.tokenizer.save(part)
        if adapter.chat_template is not None:
            write_file(part / TEMPLATE, adapter.chat_template)


def merged_config(config: Config) -> Config:
    """The config of a model that was merged with its base: no adapter any more."""
    return replace(config, init="", train=replace(config.train, lora_rank=0, base_sha256=""))
