"""Pretrained causal language models in networks of our own: weights under our names, tokenizer, chat template.

A base is a .gguf file, a folder with config.json, safetensors and tokenizer.json, or a name on the Hugging Face hub.
Nothing of it is executed, and `transformers` is not needed.

Shapes: d wide, H query heads and K key and value heads of w each.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adlm.bases.description import BaseDescription, describe_base, find_base
from adlm.bases.gguf_file import read_gguf
from adlm.bases.named import BASE_NAMES, NAMED_BASES, check_named_base
from adlm.checkpoints.model_folder import ModelFolder
from adlm.config.schema import Config, Model
from adlm.errors import UserError
from adlm.files import file_sha256, opened, read_json
from adlm.models.transformer import Transformer, on_meta
from adlm.tokens import BASE, Tokenizer, load_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# Names in the files, with ours.
GGUF_NAMES = {
    "token_embd": "embedding",
    "position_embd": "trunk.positions",
    "output_norm": "trunk.norm",
    "output": "head",
}
GGUF_LAYERS = {
    "attn_norm": "norm1",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_qkv": "qkv",
    "attn_output": "out",
    "ffn_norm": "norm2",
    "ffn_gate": "gate",
    "ffn_up": "widen",
    "ffn_down": "narrow",
}
FOLDER_NAMES = {
    "model.embed_tokens": "embedding",
    "model.norm": "trunk.norm",
    "lm_head": "head",
    "wte": "embedding",
    "wpe": "trunk.positions",
    "ln_f": "trunk.norm",
}
FOLDER_LAYERS = {
    "input_layernorm": "norm1",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "out",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "widen",
    "mlp.down_proj": "narrow",
    "ln_1": "norm1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "ln_2": "norm2",
    "mlp.c_fc": "widen",
    "mlp.c_proj": "narrow",
}
CONSTANTS = (".inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers in files of older versions of transformers


@dataclass(frozen=True)
class Base:
    """A pretrained causal model: `weights` are those of a `Transformer` with the options `model`."""

    name: str
    sha256: str
    """Of the file with the weights; of several, that of their checksums in the order of their names."""
    model: dict[str, Any]
    """The options of `model` in a config."""
    max_length: int
    """Largest number of tokens that the network was trained to read."""
    weights: dict[str, Tensor]
    """In float32. The row of the mask is the mean of the others; rows without a symbol are left out; head.bias is 0."""
    tokenizer: Tokenizer
    chat_template: str | None

    def weights_for(self, config: Config, anchored: bool) -> dict[str, Tensor]:
        """The weights for the network of a config; of an anchored pair, the lower blocks are the anchor network's.

        Both networks of a pair begin with the final norm and the head of the base.
        """
        if not anchored:
            return self.weights
        first, upper, total = config.model.blocks, config.model.num_denoiser_blocks, self.model["blocks"]
        if first + upper != total or (upper and config.model.bridge != "none"):
            raise UserError(
                f"init {config.init} is one network of {total} blocks, so model.blocks {first} + model.denoiser_blocks "
                f"{upper} must be {total}, and model.bridge {config.model.bridge} none; leave them out"
            )
        pair = {}
        for name, weight in self.weights.items():
            _, is_block, rest = name.partition("trunk.blocks.")
            number, _, layer = rest.partition(".")
            if is_block and int(number) >= first:
                pair[f"denoiser.trunk.blocks.{int(number) - first}.{layer}"] = weight
                continue
            pair[f"anchor.{name}"] = weight
            if upper and name in ("trunk.norm.weight", "trunk.norm.bias", "head.bias"):
                pair[f"denoiser.{name}"] = weight.clone()
        return pair


def read_base(source: str) -> Base:
    """The pretrained model of a .gguf file, a folder, or a name on the hub; a user error if it does not fit ours."""
    path = find_base(source)
    if path is None:
        raise UserError(f"{source} is neither a .gguf file, nor a folder with config.json, nor a name on the hub")
    description, tokenizer = describe_base(path), load_tokenizer(f"{BASE}{source}")
    reader = _gguf_tensors if path.suffix == ".gguf" else _folder_tensors
    with reader(path, description) as tensors:
        weights = _weights(path, description, tokenizer, _split_qkv(tensors))
    sha256 = tensors.sha256()
    name = BASE_NAMES.get(source, source)
    if name in NAMED_BASES:
        check_named_base(name, path, sha256)
    return Base(
        source,
        sha256,
        description.model,
        description.max_length,
        weights,
        tokenizer,
        description.chat_template,
    )


def check_base_files(source: str) -> None:
    """A user error if the files of a pretrained model are cut off. Reads no weights."""
    path = find_base(source)
    assert path is not None, "see init_folder"
    if path.suffix == ".gguf":
        gguf = read_gguf(path)
        for name in gguf.tensors:
            gguf.find(name)
        return
    with _folder_tensors(path, describe_base(path)):
        pass


def causal_model(base: Base) -> ModelFolder:
    """The base as the causal model that it is: method ar."""
    config = Config(
        method="ar",
        tokenizer=f"{BASE}{base.name}",
        vocabulary=base.tokenizer.vocabulary,
        length=min(Config.length, base.max_length),
        model=Model(**base.model),
    )
    return ModelFolder(config, base.weights, base.tokenizer, chat_template=base.chat_template)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a base, by our names."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    """In float32."""
    files: list[Path]

    def sha256(self) -> str:
        sums = [file_sha256(file) for file in self.files]
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def _weights(path: Path, description: BaseDescription, tokenizer: Tokenizer, tensors: _Tensors) -> dict[str, Tensor]:
    """All weights of the network, with the shapes that it has."""
    try:
        model = Model(**description.model)
    except UserError as error:
        raise UserError(f"{path} has a network that is not supported: {error}") from None
    vocabulary = tokenizer.vocabulary
    if model.blocks * 2 > len(tensors.shapes):
        raise UserError(f"{path} is damaged: it has {model.blocks} blocks, and {len(tensors.shapes)} tensors")
    expected = on_meta(lambda: Transformer(model, vocabulary.size, causal=True, modulated=False)).state_dict()
    for name in sorted(tensors.shapes.keys() - expected.keys()):
        raise UserError(
            f"{path}: tensor {name} is unexpected in a network of the architecture {description.architecture}"
        )
    weights = {}
    for name, like in expected.items():
        if name == "head.bias":
            weights[name] = torch.zeros(like.shape)
            continue
        shape, of_symbols = tensors.shapes.get(name), name in ("embedding.weight", "head.weight")
        if shape is None:
            raise UserError(f"{path} is damaged: tensor {name} is missing")
        rows = vocabulary.size - (vocabulary.mask_id == vocabulary.size - 1)  # the mask is not of the base
        fits = shape[:1] >= (rows,) and shape[1:] == like.shape[1:] if of_symbols else shape == like.shape
        if not fits:
            raise UserError(f"{path} is damaged: tensor {name} has shape {shape} instead of {tuple(like.shape)}")
        weight = tensors.read(name)
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise UserError(f"{path}: tensor {name} holds a NaN or an infinity, so the model is broken")
        if of_symbols:
            before, after = weight[: vocabulary.mask_id], weight[vocabulary.mask_id + 1 : vocabulary.size]
            mean = (before.sum(dim=0, keepdim=True) + after.sum(dim=0, keepdim=True)) / (len(before) + len(after))
            weight = torch.cat([before, mean, after])
        weights[name] = weight
    return weights


def _our_name(name: str, names: Mapping[str, str], layers: Mapping[str, str]) -> str:
    """Ours for a name in a file; a name that is none of those that we know stays."""
    layer, _, kind = name.removeprefix("transformer.").rpartition(".")
    in_block = re.fullmatch(r"(?:blk|model\.layers|h)\.(\d{1,9})\.(.+)", layer)
    if in_block is None:
        return f"{names[layer]}.{kind}" if layer in names else name
    return f"trunk.blocks.{in_block[1]}.{layers[in_block[2]]}.{kind}" if in_block[2] in layers else name


def _split_qkv(tensors: _Tensors) -> _Tensors:
    """With GPT-2's queries, keys and values, which are one matrix in the files, as three tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, tuple[str, int]] = {}
    for name, shape in tensors.shapes.items():
        if ".qkv." not in name or shape[0] % 3:
            shapes[name] = shape
            continue
        for number, part in enumerate(("query", "key", "value")):
            own = name.replace(".qkv.", f".{part}.")
            shapes[own], parts[own] = (shape[0] // 3, *shape[1:]), (name, number)

    def read(name: str) -> Tensor:
        if name not in parts:
            return tensors.read(name)
        whole, number = parts[name]
        return tensors.read(whole).chunk(3)[number].clone()

    return _Tensors(shapes, read, tensors.files)


@contextmanager
def _gguf_tensors(path: Path, description: BaseDescription) -> Iterator[_Tensors]:
    gguf = read_gguf(path)
    names = {_our_name(name, GGUF_NAMES, GGUF_LAYERS): name for name in gguf.tensors}

    def read(name: str) -> Tensor:
        weight = torch.from_numpy(gguf.weights(names[name]))
        *_, layer, _ = name.split(".")
        if description.architecture != "llama" or layer not in ("query", "key"):
            return weight
        # llama.cpp stores the two halves of a head that rotate against each other side by side
        heads = description.model["heads" if layer == "query" else "kv_heads"]
        return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    yield _Tensors({name: gguf.tensors[other].shape for name, other in names.items()}, read, [path])


@contextmanager
def _folder_tensors(folder: Path, description: BaseDescription) -> Iterator[_Tensors]:
    files = [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of tensors to files")
        files = [folder / Path(place).name for place in sorted(set(places.values()))]
    with ExitStack() as stack:
        names: dict[str, tuple[Any, str]] = {}
        for file in files:
            with opened(file):  # refuses pipes and devices
                try:
                    opener = stack.enter_context(safe_open(file, "pt"))
                except (SafetensorError, OSError) as error:
                    raise UserError(f"{file} cannot be read as safetensors: {error}; download it again") from None
            names |= {_our_name(name, FOLDER_NAMES, FOLDER_LAYERS): (opener, name) for name in opener.keys()}  # noqa: SIM118
        if description.model["tie_embedding"]:
            names.pop("head.weight", None)  # some files hold the shared matrix twice
        names = {name: place for name, place in names.items() if not name.endswith(CONSTANTS)}
        shapes = {name: tuple(opener.get_slice(other).get_shape()) for name, (opener, other) in names.items()}
        transposed = [  # GPT-2's matrices have a column for each output
            name for name, (_, other) in names.items() if re.search(r"(attn|mlp)\.c_\w+\.weight$", other)
        ]
        shapes |= {name: shapes[name][::-1] for name in transposed}

        def read(name: str) -> Tensor:
            opener, other = names[name]
            weight: Tensor = opener.get_tensor(other).float()
            return weight.T.contiguous() if name in transposed else weight

        yield _Tensors(shapes, read, files)
