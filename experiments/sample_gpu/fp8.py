"""What 8-bit products would take in sampling, at the shapes of a block of ADLM small: microseconds inside a CUDA graph.

python experiments/sample_gpu/fp8.py    # on a GPU with Triton
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

SHAPES = ((768, 2_304), (768, 768), (768, 3_072), (3_072, 768))
REPEATS = 30


def microseconds(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / 5 / REPEATS


@triton.jit
def cast_kernel(x, low, scales, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: the row in 8 bits, after GELU if that is wanted, and its scale."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / 448.0
    tl.store(scales + row, scale)
    tl.store(low + row * width + column, (value / scale).to(tl.float8e4nv), mask=inside)


def cast(x: torch.Tensor, gelu: bool = False, warps: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    low, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x), 1, device="cuda")
    block = triton.next_power_of_2(x.shape[1])
    cast_kernel[(len(x),)](x, low, scales, x.shape[1], gelu, block, num_warps=warps)
    return low, scales


def compare(tokens: int, inner: int, outputs: int) -> None:
    x, w = (torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) for rows in (tokens, outputs))
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
    (x8, x_scale), (w8, w_scale) = cast(x), cast(w)
    scales = {"scale_a": x_scale, "scale_b": w_scale.T, "bias": bias, "out_dtype": torch.bfloat16}

    def product() -> torch.Tensor:
        return torch._scaled_mm(x8, w8.T, **scales, use_fast_accum=True)

    exact = F.linear(x, w, bias).float()
    plain = microseconds(lambda: F.linear(x, w, bias))
    with_gelu = microseconds(lambda: torch._addmm_activation(bias, x, w.T, use_gelu=True))
    casts = [min(microseconds(partial(cast, x, gelu, warps)) for warps in (1, 2, 4, 8)) for gelu in (False, True)]
    low, error = microseconds(product), (product() - exact).norm() / exact.norm()
    print(
        f"{tokens} x {inner} x {outputs}: bf16 {plain:.1f}, with GELU {with_gelu:.1f}, fp8 {low:.1f}, "
        f"cast {casts[0]:.1f}, after GELU {casts[1]:.1f}; apart by {error:.1%}"
    )


if __name__ == "__main__":
    for tokens in (1_024, 8_192):
        for inner, outputs in SHAPES:
            compare(tokens, inner, outputs)
