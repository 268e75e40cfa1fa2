"""adlm: the Anchored Diffusion Language Model, exact and readable."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adlm.language_model import LanguageModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | Path, device: str = "cpu") -> "LanguageModel":
    """A model folder, or a checkpoint of the released code, as a model to ask; `auto` is a GPU where there is one."""
    from adlm.language_model import load as load_language_model  # torch is slow to import, and `adlm --help` needs none

    return load_language_model(path, device)
