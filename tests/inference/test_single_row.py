"""The single-row kernel equals its plain forms."""

import pytest
import torch
from worlds import seeded

from adlm.inference.fused_ops import (
    Norm,
    add_product_,
    is_single_row,
    normed_product,
    plain_add_product_,
    plain_normed_product,
    precise_product,
)
from adlm.models.heads import why_no_triton

ROUNDING = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(sum(shape))).cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("width", "num_sums"), [(16, 40), (36, 9), (768, 2304), (3072, 768), (64, 50258)])
def test_the_single_row_kernel_equals_its_plain_forms(width, num_sums, dtype):
    assert why_no_triton() == ""
    h, x, norm = noise(1, 1, width), noise(1, 1, width).to(dtype), Norm(*noise(3, 1, width))
    rms = Norm(*noise(3, 1, width), 1e-2)
    weight, bias = (noise(num_sums, width) / width**0.5).to(dtype), noise(num_sums).to(dtype)
    assert is_single_row(h)
    cases = [(norm, weight, None, "none"), (norm, weight, bias, "none"), (norm, weight, bias, "gelu")]
    cases += [(rms, weight, bias, "none"), (rms, weight[: num_sums // 2 * 2], None, "swiglu")]
    for case in cases:
        fast, slow = (form(h, *case) for form in (normed_product, plain_normed_product))
        torch.testing.assert_close(fast, slow, **ROUNDING[dtype])
    for optional_bias in (None, bias):
        ours, gate = noise(1, 1, num_sums), noise(1, num_sums)
        plain = ours.clone()
        add_product_(ours, x, weight, optional_bias, gate)
        wide = [None if part is None else part.float() for part in (x, weight, optional_bias)]
        plain_add_product_(plain, *wide, gate)  # the kernel does not round before it adds
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    sums = precise_product(x, weight, bias[:-3].float())
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(sums, exact[..., :-3].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernel_is_not_used_for_other_row_counts_float64_or_the_cpu():
    assert not any(is_single_row(x) for x in (noise(2, 8), noise(0, 8), noise(1, 8).double(), noise(1, 8).cpu()))
