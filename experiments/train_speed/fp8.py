"""What products with fp8 operands and other attention kernels take, at the shapes of ADLM small and of hidden 2048.

python experiments/train_speed/fp8.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from adlm.models.float8 import DTYPE, LARGEST, by_rows

SHAPES = (  # rows, inner, columns
    *((65_536, 768, 2_304), (65_536, 768, 768), (65_536, 768, 3_072), (65_536, 3_072, 768), (32_768, 768, 50_304)),
    *((16_384, 2_048, 6_144), (16_384, 2_048, 8_192), (16_384, 8_192, 2_048)),
)


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(4):
        work()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def by_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp8, and the one scale that gives it back."""
    scale = x.abs().amax().float().clamp(min=1e-30).view(1, 1) / LARGEST
    return (x.float() / scale).to(DTYPE), scale


def products() -> None:
    for rows, inner, columns in SHAPES:
        x, w = drawn(rows, inner), drawn(columns, inner)
        plain = milliseconds(lambda x=x, w=w: x @ w.T)
        print(
            f"{rows} x {inner} x {columns}: bf16 {plain:.3f} ms, {2 * rows * inner * columns / plain / 1e9:.0f} TFLOP/s"
        )
        for cast in (by_tensor, by_rows):
            compiled, (x8, x_scale), (w8, w_scale) = torch.compile(cast), cast(x), cast(w)
            scales = {"scale_a": x_scale, "scale_b": w_scale.mT, "out_dtype": torch.bfloat16, "use_fast_accum": True}
            product = milliseconds(lambda x=x8, w=w8, scales=scales: torch._scaled_mm(x, w.T, **scales))
            spent = milliseconds(lambda x=x, compiled=compiled: compiled(x))
            print(f"  {cast.__name__}: product {product:.3f} ms, cast {spent:.3f}")


def attention() -> None:
    inputs = [drawn(64, 12, 1_024, 64).requires_grad_() for _ in range(3)]
    slope = drawn(64, 12, 1_024, 64)

    def measure(name: str, attend: Callable[..., torch.Tensor]) -> None:
        forward = milliseconds(lambda: attend(*inputs))
        both = milliseconds(lambda: torch.autograd.grad(attend(*inputs), inputs, slope))
        print(f"{name}: forward {forward:.3f} ms, backward {both - forward:.3f} ms")

    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            measure(name, F.scaled_dot_product_attention)
    measure("flex_attention", torch.compile(flex_attention))


if __name__ == "__main__":
    products()
    attention()
