"""The Hugging Face hub: its models, and offline mode where it is unreachable, instead of long retries.

The hub's own package is imported when it is used: it takes as long as a small model.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.files import read_json

TIMEOUT_SECONDS = 5.0
MODEL_TYPE = "adlm"
"""The model_type in the config.json of exported models."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def is_hub_name(name: str) -> bool:
    """Whether a name has the form owner/name of the hub, and `owner` is not a folder here."""
    part = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
    return re.fullmatch(f"{part}/{part}", name, re.ASCII) is not None and not Path(name).parent.exists()


@cache
def skip_unreachable_hub() -> None:
    """Switch this process to offline mode if the hub does not respond. Call it before using the hub's libraries."""
    if why_unreachable():
        import huggingface_hub

        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def why_unreachable() -> str:
    """Why the hub does not respond; empty if it does."""
    import huggingface_hub
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # hides their messages about retries
    try:
        huggingface_hub.HfApi().model_info("gpt2", timeout=TIMEOUT_SECONDS)
    except Exception as error:  # noqa: BLE001  (whatever the error, only the local cache is left)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def check_model_type(path: Path, model: str) -> dict[str, Any]:
    """The content of a config.json; a user error unless it is that of an exported model."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("model_type") != MODEL_TYPE:
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        raise UserError(
            f"{model} is not a model of adlm: its config.json has model_type {kind!r:.60}, not {MODEL_TYPE!r}; give a "
            "model folder, a run, or a model exported by `adlm export`"
        )
    return raw


def download_base(name: str) -> Path:
    """The local copy of a pretrained model on the hub: its config, safetensors and tokenizer. No code is downloaded."""
    skip_unreachable_hub()
    import huggingface_hub

    weights = ["*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["config.json", *weights, "chat_template.jinja", *TOKENIZER_FILES]
            )
        )
    except Exception as error:  # noqa: BLE001  (the remedy is the same for every error of the network or the hub)
        raise UserError(
            f"{name} could not be downloaded from the Hugging Face hub ({type(error).__name__}); check the name and "
            "the network, or give a folder or a .gguf file"
        ) from None


def download_model(name: str) -> Path:
    """The local copy of a model on the hub; without a network, the one in the cache. No code is downloaded."""
    skip_unreachable_hub()
    import huggingface_hub

    try:
        check_model_type(Path(huggingface_hub.hf_hub_download(name, "config.json")), name)
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["config.json", "model.safetensors", *TOKENIZER_FILES]
            )
        )
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (the remedy is the same for every error of the network or the hub)
        raise UserError(
            f"{name} is neither a model folder nor a .ckpt file: there is nothing of that name, and it could not be "
            f"downloaded from the Hugging Face hub ({type(error).__name__}); check the name and the network"
        ) from None
