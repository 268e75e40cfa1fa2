"""What products with fp8 operands and other attention kernels take, at the shapes of ADLM small and of hidden 2048, and
a block and whole training steps whose fp8 scales are known beforehand.

python experiments/train_speed/fp8.py
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from adlm.apps.bench import measure_training
from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.models.float8 import DTYPE, LARGEST, by_rows, use_float8
from adlm.models.layers import rotary_angles
from adlm.models.transformer import Block
from adlm.training.build import OPTIONS

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


STATES, GRADIENTS = 8.0, 256.0
"""The known scales: of tokens, and of their gradients times their number."""


class KnownScales(torch.autograd.Function):
    """A product of tokens and a weight in fp8, whose scale for tokens is known before they are computed.

    So the compiler can cast where it computes them, without a maximum over a row in between. Scales are powers of two:
    normed states and what follows them are of the order of 1; the gradient of a mean over M tokens is of that of 1 / M.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        low, scale = by_tensor(weight)
        ctx.save_for_backward(h.to(torch.bfloat16), low.T.contiguous(), scale)
        ctx.dtypes = h.dtype, weight.dtype
        return scaled_product(h, low, STATES, scale, DTYPE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, low, scale = ctx.saved_tensors
        gradient = gradient.to(torch.bfloat16)
        of_weight = gradient.flatten(0, -2).T @ h.flatten(0, -2)
        known = GRADIENTS * gradient[..., 0].numel()
        of_h = scaled_product(gradient, low, known, scale, torch.float8_e5m2)
        return of_h.to(ctx.dtypes[0]), of_weight.to(ctx.dtypes[1])


def scaled_product(
    rows: torch.Tensor, low: torch.Tensor, known: float, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    cast = (rows.flatten(0, -2).float() * known).clamp(-largest, largest).to(dtype)
    scales = {"scale_a": torch.full_like(scale, 1 / known), "scale_b": scale}
    result = torch._scaled_mm(cast, low.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return result.view(*rows.shape[:-1], -1)


def known_product(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float8: bool
) -> torch.Tensor:  # in place of `adlm.models.float8.product`
    result: torch.Tensor = KnownScales.apply(h, weight)
    return result if bias is None else result + bias.to(result.dtype)


def block(device: str, rows: int, length: int) -> None:
    """A block of ADLM small forward and backward, compiled as in training; how far its gradients are from float32."""
    torch.manual_seed(0)
    plain = Block(768, 12, 128, 0.0, causal=False, qk_norm=False).to(device)
    torch.nn.init.normal_(plain.modulation.weight, std=0.02)
    torch.nn.init.ones_(plain.modulation.bias)
    h = torch.randn(rows, length, 768, device=device, requires_grad=True)
    slope = torch.randn(rows, length, 768, device=device) / (28 * rows * length)
    angles, condition = rotary_angles(length, 64, like=h), torch.randn(1, 128, device=device)
    inputs = (h, *plain.parameters())
    exact = torch.autograd.grad(plain(h, angles, condition, None), inputs, slope)
    for name, product in (("bf16", None), ("fp8, a scale a row", None), ("fp8, scales known", known_product)):
        if name != "bf16":
            use_float8(plain)
        torch._dynamo.reset()
        used = product or sys.modules["adlm.models.float8"].product
        with (
            patch("adlm.models.float8.product", used),
            patch("adlm.models.transformer.product", used),
            torch.autocast(device, torch.bfloat16),
        ):
            compiled = torch.compile(plain, options=OPTIONS) if device == "cuda" else plain

            def gradients(compiled: Callable[..., torch.Tensor] = compiled) -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(compiled(h, angles, condition, None), inputs, slope)

            apart = [float((own - other).norm() / other.norm()) for own, other in zip(gradients(), exact, strict=True)]
            spent = f"{milliseconds(gradients):.3f} ms, " if device == "cuda" else ""
        print(f"block, {name}: {spent}gradients apart by {apart[0]:.2e} (states), at most {max(apart):.2e}")


def whole_step(words: list[str], batch: int) -> None:
    """`adlm bench train` in bf16, with a scale a row, and with known scales."""

    def used(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float8: bool) -> torch.Tensor:
        return known_product(h, weight, bias, True) if float8 else F.linear(h, weight, bias)

    rows = sys.modules["adlm.models.float8"].product
    float8 = ["train.precision=float8"]
    for name, more, product in (("bf16", [], rows), ("a scale a row", float8, rows), ("scales known", float8, used)):
        torch._dynamo.reset()
        config = replace(resolve([*words, *more]), vocabulary=Vocabulary(50_258, mask_id=50_257))
        with patch("adlm.models.float8.product", product), patch("adlm.models.transformer.product", product):
            speed = measure_training(config, batch, 20, True, torch.device("cuda"), True, MagicMock())
        print(
            f"{' '.join(words)}, {name}: {speed.tokens_per_second:,.0f} tokens/s, {speed.milliseconds:.1f} ms, "
            f"{speed.of_product:.1%} of {speed.product_tflops:.0f} TFLOP/s, {dict(speed.profile)}"
        )


if __name__ == "__main__":
    if torch.cuda.is_available():
        block("cuda", 64, 1_024)
        whole_step(["owt/adlm"], 64)
        whole_step(["owt/mdlm", "model=1b"], 32)
        products()
        attention()
    else:
        block("cpu", 2, 64)
