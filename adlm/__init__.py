"""adlm: the Anchored Diffusion Language Model, exact and readable."""

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from adlm.constraints.kinds import AllOf, Characters, Choices, JsonSchema, Regex, Words

if TYPE_CHECKING:
    from adlm.language_model import LanguageModel

__version__ = "0.1.0"
__all__ = ["AllOf", "Characters", "Choices", "JsonSchema", "Regex", "Words", "__version__", "load"]

UNKNOWN_COMMIT = "unknown"


def load(path: str | Path = "box", device: str = "cpu") -> "LanguageModel":
    """Load a model folder or a released checkpoint; device `auto` is a GPU if there is one.

    `box` is the small model that the package holds, `smollm2` a larger one that needs `adlm fetch smollm2` first.
    """
    from adlm.language_model import (
        load as load_language_model,  # slow: imports torch, which `adlm --help` does not need
    )

    return load_language_model(path, device)


@cache
def code_commit() -> str:
    """The short git commit of this code; "unknown" for an installed package, also one inside another repository."""
    is_tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return (is_tracked and _git("rev-parse", "--short", "HEAD")) or UNKNOWN_COMMIT


def _git(*arguments: str) -> str:
    """The output of a git command in this folder; empty if it fails or there is no git."""
    import subprocess

    try:
        process = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


MOVED = {
    "adlm.data.reasoning.problem": "adlm.apps.reasoning.problems",
    "adlm.data.reasoning": "adlm.apps.reasoning.datasets",
    "adlm.evaluation.generation": "adlm.apps.judge",
    "adlm.evaluation": "adlm.apps",
    "adlm.harness": "adlm.apps.harness",
    "adlm.trace": "adlm.apps.trace",
}
"""Import paths that earlier documentation names, and where these modules are."""


class MovedModules:
    """A finder and loader that imports a module of MOVED under its earlier name: both names are the same module.

    Without the base classes of importlib.abc, which take 50 ms to import.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for old, new in MOVED.items():
            if f"{name}.".startswith(f"{old}."):
                return ModuleSpec(name, self, origin=new + name.removeprefix(old))  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        assert module.__spec__.origin is not None
        sys.modules[module.__name__] = import_module(module.__spec__.origin)


sys.meta_path.insert(0, MovedModules())  # first, or a moved package's modules would be imported a second time
