"""Whether the hub answers. Where it does not, its libraries look in their caches at once instead of trying for long."""

import os
from functools import cache

import huggingface_hub
from huggingface_hub.utils.logging import set_verbosity_error

SECONDS = 5.0


@cache
def skip_unreachable_hub() -> None:
    """Ask, briefly; without an answer this process works offline. Call it before the hub's libraries are used."""
    set_verbosity_error()  # type: ignore[no-untyped-call]  # their retries are not the user's concern
    try:
        huggingface_hub.HfApi().model_info("gpt2", timeout=SECONDS)
    except Exception:  # noqa: BLE001  (whatever stands in the way, the cache is all there is)
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True
