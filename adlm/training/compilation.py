"""torch.compile of the transformer trunks, in place, where a compiler is available.

Only trunks have static shapes: position selection and the chunked cross-entropy have data-dependent sizes and are not
compiled.
"""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adlm.models.logit_gradients import why_no_triton
from adlm.models.transformer import Trunk

# fallback_random uses torch's own dropout kernel, so that a seed gives the same masks compiled or not. It costs
# nothing: 197 ms per step, against 199 ms with random numbers generated in the compiled kernels (H200, batch 64).
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}


def compile_trunks(network: nn.Module, backend: str = "inductor") -> str:
    """Compile every trunk of the network in place. Returns "", or a message that says why that is not possible.

    Blocks are compiled one by one: they all share one graph, which compiles in seconds, and FSDP2 can gather the
    weights of a block around it (compile first, then shard). Whole trunks took seven times as long to compile and were
    not faster. With a backend other than inductor ("eager", to inspect the graphs), availability is not checked.
    """
    options = OPTIONS if backend == "inductor" else None
    reason = why_not_compile(next(network.parameters()).device) if options else ""
    if reason:
        return f"the networks are not compiled, which is slower: {reason}"
    for trunk in network.modules():
        if isinstance(trunk, Trunk):
            for block in trunk.blocks:
                block.compile(backend=backend, options=options)
            trunk.finish = torch.compile(trunk.finish, backend=backend, options=options)  # type: ignore[method-assign]
    return ""


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile does not work on this device, found by compiling a small function; empty if it works."""
    if device.type not in ("cpu", "cuda"):
        return f"torch.compile is not supported on {device.type}"
    missing = why_no_triton() if device.type == "cuda" else _why_no_cpp()
    if missing:
        return missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(_small_function)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        return f"torch.compile failed on a small function ({type(error).__name__})"
    return ""


def _small_function(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + 1


def _why_no_cpp() -> str:
    compilers = torch._inductor.config.cpp.cxx
    names = [name for name in (compilers if isinstance(compilers, (tuple, list)) else [compilers]) if name]
    if any(shutil.which(name) for name in names):
        return ""
    return f"there is no C++ compiler ({' or '.join(names)})"
