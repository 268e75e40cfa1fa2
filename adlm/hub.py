"""The Hugging Face hub: names of its models, and offline mode where it is unreachable, instead of long retries.

The hub's own package is imported when it is used: it takes as long as a small model.
"""

import os
import re
from functools import cache
from pathlib import Path

TIMEOUT_SECONDS = 5.0


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
