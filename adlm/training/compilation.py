"""torch.compile of the trunks, in place. Knows where the static shapes are, and that compiling may be impossible.

Position selection and the chunked cross-entropy have sizes that depend on the draw: they stay outside.
"""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adlm.models.logit_gradients import why_no_triton
from adlm.models.transformer import Trunk

# Dropout by torch's own kernel: a seed then gives the same masks whether compiled or not, and it cost nothing (197 ms a
# step against 199 with numbers drawn inside the compiled kernels; H200, batch 64).
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}


def compile_trunks(network: nn.Module, backend: str = "inductor") -> str:
    """Compiles every trunk of the network, in place, where that is possible; empty, or one sentence why it was not.

    Block by block: all blocks of a network are one graph, compiled once in seconds; FSDP2 can gather a block's weights
    around it (compile first, then shard); and whole trunks took seven times as long to compile and were no faster.
    Another backend than torch's own ("eager", to look at the graphs) is taken as it comes.
    """
    options = OPTIONS if backend == "inductor" else None
    reason = why_not_compile(next(network.parameters()).device) if options else ""
    if reason:
        return f"the networks run uncompiled, and slower: {reason}"
    for trunk in network.modules():
        if isinstance(trunk, Trunk):
            for block in trunk.blocks:
                block.compile(backend=backend, options=options)
            trunk.finish = torch.compile(trunk.finish, backend=backend, options=options)  # type: ignore[method-assign]
    return ""


def why_not_compile(device: torch.device) -> str:
    """Empty where torch.compile works on this device; else the reason, found by trying something small."""
    if device.type not in ("cpu", "cuda"):
        return f"torch.compile is not tried on {device.type}"
    missing = why_no_triton() if device.type == "cuda" else _why_no_cpp()
    if missing:
        return missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(_small)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        return f"torch.compile failed on something small ({type(error).__name__})"
    return ""


def _small(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + 1


def _why_no_cpp() -> str:
    compilers = torch._inductor.config.cpp.cxx
    named = [name for name in (compilers if isinstance(compilers, (tuple, list)) else [compilers]) if name]
    if any(shutil.which(name) for name in named):
        return ""
    return f"there is no C++ compiler ({' or '.join(named)})"
