"""What a pretrained model says of its network: a GGUF file, or a folder with config.json as `transformers` writes it.

No weights are read here, and neither torch nor tokenizers imported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.bases.gguf_file import read_gguf
from adlm.bases.named import BASE_NAMES, NAMED_BASES, named_base
from adlm.errors import UserError
from adlm.files import read_bytes, read_json
from adlm.hub import download_base, is_hub_name

ARCHITECTURES = ("llama", "qwen2", "gpt2")
CONFIG, TEMPLATE, TOKENIZER_CONFIG = "config.json", "chat_template.jinja", "tokenizer_config.json"
MAX_TEMPLATE = 2**20


@dataclass(frozen=True)
class BaseDescription:
    """The options of a pretrained network, and what else stands beside its weights."""

    architecture: str
    model: dict[str, Any]
    """The options of `model` in the config of a run; `blocks` are all blocks."""
    max_length: int
    """Largest number of tokens that the network was trained to read."""
    chat_template: str | None


def find_base(source: str) -> Path | None:
    """The .gguf file or folder of a pretrained model; None if it is neither. A name of the hub is downloaded."""
    if source in NAMED_BASES or source in BASE_NAMES:
        return named_base(BASE_NAMES.get(source, source))
    path = Path(source)
    if path.suffix == ".gguf":
        return path
    if path.is_dir():
        return path if (path / CONFIG).is_file() else None
    return download_base(source) if not path.exists() and is_hub_name(source) else None


def describe_base(path: Path) -> BaseDescription:
    """The description of a .gguf file or a folder; a user error if its architecture is not one of ARCHITECTURES."""
    return _describe_gguf(path) if path.suffix == ".gguf" else _describe_folder(path)


def _describe_gguf(path: Path) -> BaseDescription:
    gguf = read_gguf(path)
    metadata = gguf.metadata
    architecture = _supported(path, metadata.get("general.architecture"))
    values = _Values(path, {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()})
    hidden, heads = values.whole("embedding_length"), values.whole("attention.head_count")
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    if architecture == "gpt2":
        values.require("attention.layer_norm_epsilon", 1e-5)
        sizes = (hidden, heads, values.whole("block_count"), values.whole("feed_forward_length"))
        tied = "output.weight" not in gguf.tensors
        return _describe_gpt2(*sizes, values.whole("context_length"), tied, template)
    for option in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        values.require(option, hidden // heads)
    values.require("rope.scaling.type", "none")
    return BaseDescription(
        architecture,
        _options(
            architecture,
            hidden=hidden,
            heads=heads,
            blocks=values.whole("block_count"),
            kv_heads=values.whole("attention.head_count_kv", heads),
            mlp=values.whole("feed_forward_length"),
            rotary_base=values.number("rope.freq_base", 10_000.0),
            norm_epsilon=values.number("attention.layer_norm_rms_epsilon"),
            tie_embedding="output.weight" not in gguf.tensors,
        ),
        values.whole("context_length"),
        template,
    )


def _describe_folder(folder: Path) -> BaseDescription:
    raw = read_json(folder / CONFIG)
    config = raw if isinstance(raw, dict) else {}
    architecture = _supported(folder, config.get("model_type"))
    values = _Values(folder / CONFIG, config)
    if architecture == "gpt2":
        hidden, length = values.whole("n_embd"), values.whole("n_positions")
        values.require("layer_norm_epsilon", 1e-5)
        values.require("activation_function", "gelu_new")
        values.require("scale_attn_weights", True)
        values.require("scale_attn_by_inverse_layer_idx", False)
        sizes = (hidden, values.whole("n_head"), values.whole("n_layer"), values.whole("n_inner", 4 * hidden))
        tied = bool(config.get("tie_word_embeddings", True))
        return _describe_gpt2(*sizes, length, tied, folder_template(folder))
    hidden, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    values.require("head_dim", hidden // heads)
    values.require("hidden_act", "silu")
    for option in ("attention_bias", "mlp_bias", "use_sliding_window", "rope_scaling"):
        values.require(option, False)
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict):  # transformers 5; before it, rope_theta and rope_scaling
        values = _Values(folder / CONFIG, {**config, **rotary})
    values.require("rope_type", "default")
    return BaseDescription(
        architecture,
        _options(
            architecture,
            hidden=hidden,
            heads=heads,
            blocks=values.whole("num_hidden_layers"),
            kv_heads=values.whole("num_key_value_heads", heads),
            mlp=values.whole("intermediate_size"),
            rotary_base=values.number("rope_theta", 10_000.0),
            norm_epsilon=values.number("rms_norm_eps", 1e-6),
            tie_embedding=bool(config.get("tie_word_embeddings", False)),
        ),
        values.whole("max_position_embeddings"),
        folder_template(folder),
    )


def _options(architecture: str, **sizes: Any) -> dict[str, Any]:
    """The options of `model`. Pretrained networks have no dropout."""
    return {"family": "llama", **sizes, "qkv_bias": architecture == "qwen2", "dropout": 0.0}


def _describe_gpt2(
    hidden: int, heads: int, blocks: int, mlp: int, length: int, tied: bool, template: str | None
) -> BaseDescription:
    sizes = {"hidden": hidden, "heads": heads, "blocks": blocks, "mlp": mlp, "positions": length}
    model = {"family": "gpt2", **sizes, "tie_embedding": tied, "dropout": 0.0}
    return BaseDescription("gpt2", model, length, template)


def _supported(path: Path, architecture: Any) -> str:
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} has the architecture {architecture!r:.60}; {', '.join(ARCHITECTURES)} are supported, such as "
            "SmolLM2, TinyLlama, Qwen2.5 and GPT-2"
        )
    return str(architecture)


@dataclass(frozen=True)
class _Values:
    """The entries of a file's header, checked as they are read."""

    path: Path
    entries: dict[str, Any]

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.entries.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise UserError(f"{self.path}: {name} is {value!r:.60}, and must be a number from 1 to {2**31 - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.entries.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise UserError(f"{self.path}: {name} is {value!r:.60}, and must be a positive number")
        return float(f"{value:.7g}")  # as it was written before it became a float32

    def require(self, name: str, supported: Any) -> None:
        """A user error for a value other than that of our networks; a file that has none is fine."""
        value = self.entries.get(name)
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # as in `number`
        if value is not None and value != supported:
            raise UserError(f"{self.path}: {name} {value!r:.60} is not supported, only {supported!r}")


def folder_template(folder: Path) -> str | None:
    """The chat template of a folder: a file of its own, or an entry of the tokenizer's config."""
    if (folder / TEMPLATE).is_file():
        return read_bytes(folder / TEMPLATE, MAX_TEMPLATE).decode(errors="replace")
    raw = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else None
    template = raw.get("chat_template") if isinstance(raw, dict) else None
    if isinstance(template, list):  # several by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None
