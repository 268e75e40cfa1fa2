"""Networks on the meta device: parameter names and shapes without storage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Network = TypeVar("Network", bound=nn.Module)

INITIALIZERS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoInitialization(TorchFunctionMode):
    """Skips random initialization: on the meta device it would make PyTorch import its compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        return named["tensor"] if func in INITIALIZERS else func(*args, **named)


def on_meta(build: Callable[[], Network]) -> Network:
    """`build()` on the meta device."""
    with torch.device("meta"), _NoInitialization():
        return build()
