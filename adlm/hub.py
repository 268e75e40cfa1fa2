"""Offline mode of the Hugging Face libraries when the hub is unreachable, instead of their long retries."""

import os
from functools import cache

import huggingface_hub
from huggingface_hub.utils.logging import set_verbosity_error

TIMEOUT_SECONDS = 5.0


@cache
def skip_unreachable_hub() -> None:
    """Switch this process to offline mode if the hub does not respond. Call it before using the hub's libraries."""
    if why_unreachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def why_unreachable() -> str:
    """Why the hub does not respond; empty if it does."""
    set_verbosity_error()  # type: ignore[no-untyped-call]  # hides their messages about retries
    try:
        huggingface_hub.HfApi().model_info("gpt2", timeout=TIMEOUT_SECONDS)
    except Exception as error:  # noqa: BLE001  (whatever the error, only the local cache is left)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""
