"""Products with operands of 8 bits: their errors, their gradients, and when layers of blocks use them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from worlds import seeded

from adlm.config.schema import Config, Model, Train, Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.models.float8 import LARGEST, BlockLinear, by_rows, product, use_float8
from adlm.training.build import check_precision

ERROR = 2**-3
"""Relative to the sizes of both operands, an upper bound of the error: rounding to float8_e4m3fn changes each number by
at most 2^-4 of itself, and both operands are rounded."""


def operands(rows: int = 24, width: int = 64, outputs: int = 48):
    """Rows (2, rows / 2, width) of very different sizes, and a weight and a bias."""
    h = torch.randn(2, rows // 2, width, generator=seeded())
    h = h * 10.0 ** torch.linspace(-6, 6, rows).view(2, -1, 1)
    weight = torch.randn(outputs, width, generator=seeded(1)) * 10.0 ** torch.linspace(-3, 3, outputs)[:, None]
    return h.requires_grad_(), weight.requires_grad_(), torch.randn(outputs, generator=seeded(2))


def test_every_row_and_every_output_has_a_small_error_of_its_own():
    h, weight, bias = operands()
    exact, rounded = F.linear(h, weight), product(h, weight, None, float8=True)
    assert rounded.dtype == torch.bfloat16
    sizes = h.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    errors = (rounded.float() - exact).abs() / sizes
    assert 1e-4 < errors.max() < ERROR, "the operands are rounded, and to a scale of their own"
    torch.testing.assert_close(product(h, weight, bias, True), rounded + bias.bfloat16())
    torch.testing.assert_close(product(h, weight, bias, False), F.linear(h, weight, bias))


def test_the_gradients_are_those_of_the_product_up_to_rounding():
    h, weight, _ = operands()
    upstream = torch.randn(2, 12, 48, generator=seeded(3)) * 10.0 ** torch.linspace(-4, 4, 24).view(2, 12, 1)
    exact = torch.autograd.grad(F.linear(h, weight), (h, weight), upstream)
    ours = torch.autograd.grad(product(h, weight, None, True), (h, weight), upstream.bfloat16())
    assert [each.dtype for each in ours] == [torch.float32, torch.float32]
    of_rows = (ours[0] - exact[0]).abs() / (upstream.norm(dim=-1, keepdim=True) * weight.norm(dim=0))
    assert 1e-5 < of_rows.max() < ERROR
    of_weight = (ours[1] - exact[1]).abs() / (upstream.flatten(0, 1).norm(dim=0)[:, None] * h.flatten(0, 1).norm(dim=0))
    assert 0 < of_weight.max() < 2**-7, "sums over tokens are of bfloat16 operands"


def test_what_is_not_finite_stays_visible():
    h, weight, _ = operands()
    broken = h.detach().clone()
    broken[0, 1, 5] = torch.inf
    result = product(broken, weight, None, True)
    assert not result[0, 1].isfinite().any()
    assert result[0, 2:].isfinite().all()
    assert (product(torch.zeros(1, 64), weight, None, True) == 0).all()


@pytest.mark.parametrize(
    "family", [{}, {"family": "llama", "kv_heads": 1, "bridge": "none"}, {"family": "gpt2", "positions": 16}]
)
def test_layers_of_blocks_use_it_in_training_only(family, monkeypatch):
    model = Model(hidden=32, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0, **family)
    config = Config(vocabulary=Vocabulary(size=17, mask_id=16), length=16, model=model, method="adlm")
    network = method_of(config).build()
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.2, generator=seeded())
    z = torch.randint(17, (2, 16), generator=seeded())
    before = network.eval()(z)
    use_float8(network)
    torch.testing.assert_close(network(z), before, rtol=0, atol=0)
    assert not torch.equal(network.train()(z).float(), before)
    torch.testing.assert_close(network.train()(z).float(), before, rtol=0.3, atol=0.3)
    used = {name.rpartition(".")[2] for name, layer in network.named_modules() if isinstance(layer, BlockLinear)}
    of_blocks = {
        name.rpartition(".")[2]
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and ".blocks." in name and "modulation" not in name
    }
    assert used == of_blocks


GPT2 = Model(family="gpt2", hidden=64, heads=2, mlp=100, positions=16, bridge="none")
LLAMA = Model(family="llama", hidden=64, heads=8, kv_heads=1, bridge="none")


def with_float8(model: Model | None = None, **train) -> Config:
    return Config(length=16, model=model or Model(), train=Train(precision="float8", **train))


@pytest.mark.parametrize(
    ("config", "capability", "error"),
    [
        (with_float8(), (8, 0), r"needs a GPU with 8-bit products .*, and this is some GPU; use train.precision=auto"),
        (with_float8(lora_rank=4), (9, 0), "train.lora_rank is 4; use train.precision=auto"),
        (with_float8(Model(hidden=40, heads=2)), (9, 0), "multiples of 16: model.hidden 40; change it"),
        (with_float8(GPT2), (9, 0), "multiples of 16: model.mlp 100"),
        (with_float8(LLAMA), (9, 0), "multiples of 16: model.kv_heads gives keys of width 8"),
    ],
)
def test_what_cannot_run_is_refused(config, capability, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    with pytest.raises(UserError, match=error):
        check_precision(config, torch.device("cuda"))
    check_precision(replace(config, train=Train()), torch.device("cuda"))


def test_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"float8 needs a GPU with 8-bit products .*, and this is cpu"):
        check_precision(with_float8(), torch.device("cpu"))


def test_the_scale_of_a_long_row_is_that_of_all_of_it():
    matrix = torch.randn(3, 2304, generator=seeded())
    matrix[0, 0], matrix[1, 1500], matrix[2, 2303] = 50, -60, 70
    low, scales = by_rows(matrix)
    torch.testing.assert_close(scales * LARGEST, torch.tensor([[50.0], [60.0], [70.0]]))
    assert ((low.float() * scales - matrix).abs() <= 2**-4 * matrix.abs() + scales * 2**-10).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_multiplies_the_rounded_operands(compiled):
    h, weight, bias = (each.detach().cuda().requires_grad_() for each in operands())
    upstream = torch.randn(2, 12, 48, generator=seeded(3)).bfloat16().cuda()
    result = (torch.compile(product) if compiled else product)(h, weight, bias, True)
    ours = [result, *torch.autograd.grad(result, (h, weight), upstream)]
    rounded_h, rows, columns, rounded_upstream = (
        (low.float() * scales).view_as(operand)
        for operand in (h, weight, weight.T, upstream)
        for low, scales in [by_rows(operand.detach().flatten(0, -2))]
    )
    of_weight = upstream.float().flatten(0, 1).T @ h.bfloat16().float().flatten(0, 1)
    expected = [rounded_h @ rows.T + bias, rounded_upstream @ columns.T, of_weight]
    for each, other in zip(ours, expected, strict=True):
        scale = other.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(each.float() / scale, other / scale, rtol=0, atol=2e-2)
