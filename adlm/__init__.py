"""adlm: the Anchored Diffusion Language Model, exact and readable."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adlm.language_model import LanguageModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | Path = "box", device: str = "cpu") -> "LanguageModel":
    """Load a model folder or a released checkpoint; device `auto` is a GPU if there is one.

    `box` is the small model that the package holds.
    """
    from adlm.language_model import (
        load as load_language_model,  # slow: imports torch, which `adlm --help` does not need
    )

    return load_language_model(path, device)
