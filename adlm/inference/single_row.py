"""Products of a single row with a matrix, and what stands before and after them, in one pass. Knows no weights' names.

One token more of one text is one row. Its products read every weight for a single sum, so all that matters is to read
each weight once, by all processors, and to start few kernels. On CUDA a Triton kernel does that; elsewhere, and as its
oracles, the plain forms run. `h` is the residual stream, in float32 or better. For 8 rows a kernel of the same kind was
slower than cuBLAS (on an H200 0.58 ms a token of AR small, against 0.46).

Shapes: rows (..., d), O sums of each.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import Norm, by_kernel, plain_add_norm_, power_of_two, starts_early

WEIGHTS_TOGETHER = 8192  # of one program: 16 KB on their way at once
PROCESSORS = 132  # of an H100 or H200; each should have a program at least


def is_single_row(x: Tensor) -> bool:
    """Whether x (..., d) is a single row, where the kernel runs."""
    return x.numel() == x.shape[-1] and by_kernel(x) and kernel_is_right(x.device)


@cache
def kernel_is_right(device: torch.device) -> bool:
    """Whether the kernel says what the plain form does, by trying something small.

    Another device or another Triton than it was made with may build it differently, or not at all.
    """
    draws = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draws, device=device, dtype=dtype)
        for shape, dtype in (((1, 96), torch.bfloat16), ((40, 96), torch.bfloat16), ((40,), torch.float32))
    )
    sums = torch.empty(1, 40, device=device)
    try:
        _multiply(x, weight, sums, bias=bias)
    except Exception:  # noqa: BLE001  (Triton's own errors share no class but this)
        return False
    return torch.allclose(sums, x.float() @ weight.float().T + bias, atol=1e-2)


def normed_product(h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """W (LayerNorm(h) * norm.weight + norm.shift) + b, or its gelu (by the tanh form), in the dtype of W (O, d).

    The parts of the norm are (1, d).
    """
    if not is_single_row(h):
        return plain_normed_product(h, norm, weight, bias, gelu)
    sums = weight.new_empty(*h.shape[:-1], len(weight))
    _multiply(h, weight, sums, bias=bias, norm=norm, gelu=gelu)
    return sums


def plain_normed_product(
    h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    sums = F.linear(plain_add_norm_(h, None, norm, weight.dtype), weight, bias)
    return F.gelu(sums, approximate="tanh") if gelu else sums


def add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    """h (..., O) becomes h + gate * (W x + b) for x (..., d) and gate (1, O)."""
    if is_single_row(h):
        _multiply(x, weight, h, bias=bias, gate=gate)
    else:
        plain_add_product_(h, x, weight, bias, gate)


def plain_add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    h.addcmul_(gate, F.linear(x, weight, bias).to(h.dtype))


def precise_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b with sums that are not rounded, in the dtype of b (O,); rows of W after the first O are left out."""
    if not is_single_row(x):
        return plain_precise_product(x, weight, bias)
    sums = bias.new_empty(*x.shape[:-1], len(bias))
    _multiply(x, weight, sums, bias=bias)
    return sums


def plain_precise_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != bias.dtype:
        product = torch.mm(x, weight.T, out_dtype=bias.dtype)
    else:
        product = (x @ weight.T).to(bias.dtype)
    return product[..., : len(bias)] + bias


def _multiply(
    x: Tensor,
    weight: Tensor,
    sums: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    gelu: bool = False,
) -> None:
    """Writes sums, or with a gate adds to them."""
    from adlm.inference.single_row_kernel import single_row_kernel  # Triton is imported where it runs

    width, num_sums = x.shape[-1], sums.shape[-1]
    together, early = _sums_together(width, num_sums), starts_early(x.device)
    with torch.cuda.device(x.device):
        single_row_kernel[(-(-num_sums // together),)](
            x.contiguous(),
            None if norm is None else norm.weight,
            None if norm is None else norm.shift,
            weight,
            bias,
            gate,
            sums,
            num_sums,
            width,
            together,
            power_of_two(width),
            norm is not None,
            bias is not None,
            gelu,
            gate is not None,
            early,
            launch_pdl=early,
        )


def _sums_together(width: int, num_sums: int) -> int:
    """How many sums one program forms. On an H200: 8 of qkv and of the head, 4 of out, 2 of narrow were fastest."""
    together = max(2, WEIGHTS_TOGETHER // power_of_two(width))
    while together > 2 and num_sums < PROCESSORS * together:
        together //= 2
    return together
