"""Networks on the meta device: names and shapes of the weights without the weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Network = TypeVar("Network", bound=nn.Module)

INITIALIZERS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoInitialization(TorchFunctionMode):
    """Random initialization does nothing inside: on the meta device torch would load its compiler for it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        return given["tensor"] if func in INITIALIZERS else func(*args, **given)


def on_meta(build: Callable[[], Network]) -> Network:
    """The network that `build` makes, on the meta device."""
    with torch.device("meta"), _NoInitialization():
        return build()
