"""torch.compile for the layers of a model of `transformers`, so that all layers share one graph.

A continuous slot is one position read by all layers: thousands of small operations, whose launches take far longer than
their work. Compiled whole, a model of 30 layers takes minutes. Here one layer is compiled, with the keys and values
that it has read before as plain inputs and outputs.

Shapes: B rows, n new tokens, L tokens in all, d wide, H heads of d / H each.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LayerOutput = tuple[Tensor, Tensor, Tensor]


class LayerCache:
    """The keys and values (B, H, L, d / H) of one layer, with the method that attention calls."""

    def __init__(self, keys: Tensor | None, values: Tensor | None):
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile the layers of a causal model in place."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # a layer's own number is no reason to compile it again
    layers = max((module for module in model.base_model.children() if isinstance(module, nn.ModuleList)), key=len)
    compiled = torch.compile(_read_layer, backend=backend, dynamic=True)
    for number, layer in enumerate(layers):
        layer.forward = partial(_forward, compiled, inspect.signature(type(layer).forward), layer, number)


def _read_layer(
    layer: nn.Module, hidden: Tensor, keys: Tensor | None, values: Tensor | None, arguments: dict[str, Any]
) -> LayerOutput:
    """Hidden states (B, n, d) after the layer, and all keys and values."""
    cache = LayerCache(keys, values)
    hidden = type(layer).forward(layer, hidden, past_key_values=cache, **arguments)
    assert cache.keys is not None
    assert cache.values is not None
    return hidden, cache.keys, cache.values


def _forward(
    compiled: Callable[..., LayerOutput],
    signature: inspect.Signature,
    layer: nn.Module,
    number: int,
    hidden: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The forward of a compiled layer: takes its part of the model's KV cache, and puts it back."""
    arguments = signature.bind(layer, hidden, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    cache = arguments.pop("past_key_values")
    for name in ("self", "hidden_states"):
        del arguments[name]
    past = cache.layers[number] if number < len(cache.layers) and cache.layers[number].is_initialized else None
    keys, values = (None, None) if past is None else (past.keys, past.values)
    hidden, keys, values = compiled(layer, hidden, keys, values, arguments)
    if past is None:
        cache.update(keys, values, number)
    else:
        past.keys, past.values = keys, values
    return hidden
