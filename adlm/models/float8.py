"""Linear layers of blocks, whose products can have operands of 8 bits in training (`train.precision` float8).

Operands are float8_e4m3fn with a scale of their own for each row of a product's left operand and each column of its
right one, so that no large value of one token or of one weight takes the bits of the others. Results, and the gradient
of the weight, whose sums run over all tokens, are bfloat16.

Shapes: rows (..., K) of tokens, N outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
MULTIPLE = 16
"""Both widths of a layer are multiples of it."""


class BlockLinear(nn.Linear):
    """A linear layer of a block. With `float8` its products in training have operands of 8 bits."""

    float8 = False

    def forward(self, h: Tensor) -> Tensor:
        return product(h, self.weight, self.bias, self.float8 and self.training)


def use_float8(network: nn.Module) -> None:
    """From now on, in training: all linear layers of the blocks."""
    for layer in network.modules():
        if isinstance(layer, BlockLinear):
            layer.float8 = True


def product(h: Tensor, weight: Tensor, bias: Tensor | None, float8: bool) -> Tensor:
    """W h + b for rows h and W (N, K)."""
    if not float8:
        return F.linear(h, weight, bias)
    result: Tensor = _Float8Product.apply(h, weight)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias.to(result.dtype)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h.to(torch.bfloat16), *by_rows(weight.T))
        ctx.dtypes = h.dtype, weight.dtype
        return _product(h, *by_rows(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, columns, scales = ctx.saved_tensors
        gradient = gradient.to(torch.bfloat16)
        of_weight = gradient.flatten(0, -2).T @ h.flatten(0, -2)
        return _product(gradient, columns, scales).to(ctx.dtypes[0]), of_weight.to(ctx.dtypes[1])


def _product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """rows (..., K) times the transpose of a weight (N, K) that is in 8 bits, with its scales (N, 1)."""
    low, own_scales = by_rows(rows.flatten(0, -2))
    result = torch._scaled_mm(low, weight.T, own_scales, scales.T, out_dtype=torch.bfloat16, use_fast_accum=True)
    return result.view(*rows.shape[:-1], -1)


def by_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, contiguous, and the scale of each row, which gives it back: (M, K) and (M, 1)."""
    scales = matrix.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-30) / LARGEST
    return (matrix.float() / scales).to(DTYPE).contiguous(), scales
