"""CUDA graphs: a function of tensors recorded once and replayed without its host's work. Knows nothing of networks.

A small network's block is eight kernels of a few microseconds each, less than the host needs to launch them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Other = TypeVar("Other")


class CudaGraph(Generic[Result]):
    """What a function did with inputs of these shapes. It reads copies of the inputs and always writes one result."""

    def __init__(self, function: Callable[..., Result], inputs: tuple[Tensor | None, ...], recorder: "GraphCache[Any]"):
        self.inputs = [None if given is None else given.clone() for given in inputs]
        stream, outside = recorder.stream, torch.cuda.current_stream(recorder.stream.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are built, and libraries choose theirs and take their workspace
                function(*self.inputs)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(self.graph, recorder.pool, stream, capture_error_mode="thread_local"):
            self.result = function(*self.inputs)
        outside.wait_stream(stream)

    def replay(self, *inputs: Tensor | None) -> Result:
        for held, given in zip(self.inputs, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        self.graph.replay()
        return self.result


class GraphCache(Generic[Result]):
    """Records functions on one device, and remembers the last few by the shapes of their inputs.

    Its recordings share the memory of what they need in between: a result holds until the next replay of any of them.
    """

    def __init__(self, device: torch.device, most: int = 8):
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool, self.most = torch.cuda.graph_pool_handle(), most
        self.recordings: dict[tuple[object, ...], CudaGraph[Result]] = {}

    def record(self, function: Callable[..., Other], *inputs: Tensor | None) -> CudaGraph[Other]:
        """The function is called three times: it must leave everything as a single call would."""
        with torch.cuda.device(self.stream.device):
            return CudaGraph(function, inputs, self)

    def replay(self, function: Callable[..., Result], *inputs: Tensor | None) -> Result:
        """function(*inputs), always the same function, recorded where no recording has these shapes."""
        shapes = tuple(None if given is None else (given.shape, given.dtype) for given in inputs)
        recording = self.recordings.pop(shapes, None) or self.record(function, *inputs)
        self.recordings[shapes] = recording  # the last one used is the last one to go
        if len(self.recordings) > self.most:
            del self.recordings[next(iter(self.recordings))]
        return recording.replay(*inputs)


@cache
def why_no_cuda_graphs(device: torch.device) -> str:
    """Empty where CUDA graphs can be recorded; else the reason, found by trying something small."""
    if device.type != "cuda":
        return f"{device.type} has no CUDA graphs"
    try:
        GraphCache[Tensor](device).replay(torch.neg, torch.ones(1, device=device))
    except RuntimeError as error:
        return f"recording a CUDA graph failed on something small ({error})"
    return ""
