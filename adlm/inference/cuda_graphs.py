"""CUDA graphs: a function of tensors captured once and replayed without its launch overhead. Independent of networks.

A block of a small network is eight kernels of a few microseconds each, less than the host needs to launch them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Captured = TypeVar("Captured")


class CudaGraph(Generic[Result]):
    """A function captured for inputs of given shapes. It reads copies of the inputs and reuses its output tensors."""

    def __init__(self, function: Callable[..., Result], inputs: tuple[Tensor | None, ...], cache: "GraphCache[Any]"):
        self.inputs = [None if tensor is None else tensor.clone() for tensor in inputs]
        stream, outside = cache.stream, torch.cuda.current_stream(cache.stream.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm up: kernels are compiled, libraries select algorithms and allocate workspaces
                function(*self.inputs)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture.
        with torch.cuda.graph(self.graph, cache.pool, stream, capture_error_mode="thread_local"):
            self.result = function(*self.inputs)
        outside.wait_stream(stream)

    def replay(self, *inputs: Tensor | None) -> Result:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            if static is not None and tensor is not None:
                static.copy_(tensor)
        self.graph.replay()
        return self.result


class GraphCache(Generic[Result]):
    """Captures functions on one device and caches the most recently used graphs by the shapes of their inputs.

    The graphs share one memory pool: a result is valid until the next replay of any of them.
    """

    def __init__(self, device: torch.device, max_graphs: int = 8):
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool, self.max_graphs = torch.cuda.graph_pool_handle(), max_graphs
        self.graphs: dict[tuple[object, ...], CudaGraph[Result]] = {}

    def capture(self, function: Callable[..., Captured], *inputs: Tensor | None) -> CudaGraph[Captured]:
        """Calls the function three times, so three calls must have the same effect as one."""
        with torch.cuda.device(self.stream.device):
            return CudaGraph(function, inputs, self)

    def replay(self, function: Callable[..., Result], *inputs: Tensor | None) -> Result:
        """function(*inputs), captured if no cached graph has these shapes. Always pass the same function."""
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        graph = self.graphs.pop(shapes, None) or self.capture(function, *inputs)
        self.graphs[shapes] = graph  # moved to the end: the least recently used graph is evicted first
        if len(self.graphs) > self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        return graph.replay(*inputs)


@cache
def why_no_cuda_graphs(device: torch.device) -> str:
    """The reason why CUDA graphs cannot be captured on the device, found by capturing a tiny one; empty if they can."""
    if device.type != "cuda":
        return f"{device.type} has no CUDA graphs"
    try:
        GraphCache[Tensor](device).replay(torch.neg, torch.ones(1, device=device))
    except RuntimeError as error:
        return f"capturing a tiny CUDA graph failed ({error})"
    return ""
