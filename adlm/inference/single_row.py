"""Matrix-vector products fused with the norm before and the residual addition after them. Independent of networks.

Decoding one token of one text is a forward pass of a single row. It is bound by memory bandwidth and kernel launches:
each weight should be read once, by all multiprocessors, in few kernels. On CUDA a Triton kernel does this; elsewhere,
and as test oracles, the plain forms run. `h` is the residual stream, in float32 or float64. For 8 rows a similar kernel
was slower than cuBLAS (0.58 ms per token of AR small on an H200, against 0.46).

Shapes: rows (..., d), O outputs of each.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.inference.fused_ops import Norm, can_use_triton, next_power_of_two, plain_add_norm_, supports_dependent_launch

WEIGHTS_PER_PROGRAM = 8192  # 16 KB in flight in bfloat16
NUM_MULTIPROCESSORS = 132  # of an H100 or H200; each should run at least one program


def is_single_row(x: Tensor) -> bool:
    """Whether x (..., d) is a single row and the kernel can run on it."""
    return x.numel() == x.shape[-1] and can_use_triton(x) and kernel_matches_plain_form(x.device)


@cache
def kernel_matches_plain_form(device: torch.device) -> bool:
    """Whether the kernel equals the plain form on a small example.

    On other devices or Triton versions than it was written for, it may fail to compile or be miscompiled.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape, dtype in (((1, 96), torch.bfloat16), ((40, 96), torch.bfloat16), ((40,), torch.float32))
    )
    sums = torch.empty(1, 40, device=device)
    try:
        _launch_kernel(x, weight, sums, bias=bias)
    except Exception:  # noqa: BLE001  (Triton's errors have no other common base class)
        return False
    return torch.allclose(sums, x.float() @ weight.float().T + bias, atol=1e-2)


def normed_product(h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """W (LayerNorm(h) * norm.weight + norm.shift) + b, optionally its GELU (tanh form), in the dtype of W (O, d).

    The tensors of the norm are (1, d).
    """
    if not is_single_row(h):
        return plain_normed_product(h, norm, weight, bias, gelu)
    sums = weight.new_empty(*h.shape[:-1], len(weight))
    _launch_kernel(h, weight, sums, bias=bias, norm=norm, gelu=gelu)
    return sums


def plain_normed_product(
    h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    sums = F.linear(plain_add_norm_(h, None, norm, weight.dtype), weight, bias)
    return F.gelu(sums, approximate="tanh") if gelu else sums


def add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    """h (..., O) <- h + gate * (W x + b), in place, for x (..., d) and gate (1, O)."""
    if is_single_row(h):
        _launch_kernel(x, weight, h, bias=bias, gate=gate)
    else:
        plain_add_product_(h, x, weight, bias, gate)


def plain_add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    h.addcmul_(gate, F.linear(x, weight, bias).to(h.dtype))


def precise_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b accumulated and returned in the dtype of b (O,); rows of W after the first O are ignored."""
    if not is_single_row(x):
        return plain_precise_product(x, weight, bias)
    sums = bias.new_empty(*x.shape[:-1], len(bias))
    _launch_kernel(x, weight, sums, bias=bias)
    return sums


def plain_precise_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != bias.dtype:
        product = torch.mm(x, weight.T, out_dtype=bias.dtype)
    else:
        product = (x @ weight.T).to(bias.dtype)
    return product[..., : len(bias)] + bias


def _launch_kernel(
    x: Tensor,
    weight: Tensor,
    sums: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    gelu: bool = False,
) -> None:
    """Run the kernel: overwrites `sums`, or with a gate adds to them."""
    from adlm.inference.single_row_kernel import single_row_kernel  # Triton is imported only where it is used

    width, num_sums = x.shape[-1], sums.shape[-1]
    per_program, dependent_launch = _sums_per_program(width, num_sums), supports_dependent_launch(x.device)
    with torch.cuda.device(x.device):
        single_row_kernel[(-(-num_sums // per_program),)](
            x.contiguous(),
            None if norm is None else norm.weight,
            None if norm is None else norm.shift,
            weight,
            bias,
            gate,
            sums,
            num_sums,
            width,
            per_program,
            next_power_of_two(width),
            norm is not None,
            bias is not None,
            gelu,
            gate is not None,
            dependent_launch,
            launch_pdl=dependent_launch,
        )


def _sums_per_program(width: int, num_sums: int) -> int:
    """Outputs per program. Fastest on an H200: 8 for qkv and the head, 4 for `out`, 2 for `narrow`."""
    per_program = max(2, WEIGHTS_PER_PROGRAM // next_power_of_two(width))
    while per_program > 2 and num_sums < NUM_MULTIPROCESSORS * per_program:
        per_program //= 2
    return per_program
