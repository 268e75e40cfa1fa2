"""What the parts of a step reach alone: products by shape, with and without a padded vocabulary; attention; gradients.

python experiments/train_speed/pieces.py
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adlm.models.heads import logit_gradients_, plain_logit_gradients_

TOKENS, WIDTH, ROWS = 64 * 1024, 768, 5_336


def milliseconds(work: Callable[..., object], *inputs: object) -> float:
    for _ in range(3):
        work(*inputs)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work(*inputs)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda")).bfloat16()


def product(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    spent = milliseconds(torch.mm, a, b)
    print(
        f"{name:34} {spent:7.3f} ms  {2 * a.shape[0] * a.shape[1] * b.shape[1] / spent / 1e9:5.0f} TFLOP/s", flush=True
    )


def main() -> None:
    for name, inner, outer in (("qkv", 768, 2304), ("out", 768, 768), ("widen", 768, 3072), ("narrow", 3072, 768)):
        h, weight, pull = drawn(TOKENS, inner), drawn(outer, inner), drawn(TOKENS, outer)
        product(f"{name}, forward", h, weight.T)
        product(f"{name}, to the input", pull, weight)
        product(f"{name}, to the weight", pull.T, h)
    for symbols in (50_258, 50_304):
        h, weight, pull = drawn(ROWS, WIDTH), drawn(symbols, WIDTH), drawn(ROWS, symbols)
        product(f"head of {symbols}, forward", h, weight.T)
        product(f"head of {symbols}, to the input", pull, weight)
        product(f"head of {symbols}, to the weight", pull.T, h)
    q, k, v = (drawn(64, 1024, 12, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    pull = drawn(64, 1024, 12, 64).transpose(1, 2)

    def attend() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), pull)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            print(f"{backend.name.lower()}, forth and back {milliseconds(attend):.3f} ms for 64 x 12 x 1024 x 64")
    targets, weight = torch.randint(50_257, (ROWS,), device="cuda"), torch.rand(ROWS, device="cuda")
    for form in (logit_gradients_, plain_logit_gradients_):
        logits = drawn(ROWS, 50_304, scale=2)  # overwritten, so later rounds work on gradients: the same work
        print(f"{form.__name__} {milliseconds(form, logits, targets, weight, True):.3f} ms for {ROWS} rows of 50,304")


if __name__ == "__main__":
    main()
