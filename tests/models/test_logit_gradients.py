"""Nats and logit gradients equal autograd's, in both implementations."""

import pytest
import torch
import torch.nn.functional as F
from worlds import seeded

from adlm.models.heads import Positions, logit_gradients_, plain_logit_gradients_, why_no_triton


def problem(rows: int = 5, symbols: int = 9, dtype=torch.float64, device="cpu"):
    """Logits, some of them -inf, targets and weights."""
    logits = 3 * torch.randn(rows, symbols, generator=seeded(), dtype=torch.float64)
    logits[:, symbols // 2] = -torch.inf
    targets = torch.randint(symbols // 2, (rows,), generator=seeded(1))
    weight = torch.rand(rows, generator=seeded(2)).double()
    weight[0] = 0
    return logits.to(device, dtype), targets.to(device), weight.to(device, torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("form", [logit_gradients_, plain_logit_gradients_])
def test_the_logits_are_overwritten_by_the_gradient_of_the_weighted_nats(form):
    logits, targets, weight = problem()
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad((weight * expected).sum(), leaf)
    unchanged = logits.clone()
    torch.testing.assert_close(form(unchanged, targets, weight, False), expected.detach())
    assert torch.equal(unchanged, logits)
    torch.testing.assert_close(form(logits, targets, weight, True), expected.detach())
    torch.testing.assert_close(logits, gradient)
    assert (logits[:, 4] == 0).all()


def test_positions_are_those_whose_weight_is_not_zero():
    weight = torch.tensor([[0.0, 2.0, 0.0], [-1.0, 0.0, 3.0]])
    assert Positions(weight).index().tolist() == [1, 3, 5]
    assert Positions(torch.zeros(2, 3)).index().tolist() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symbols", [9, 5_000, 50_304])
def test_the_kernel_equals_the_plain_form(dtype, symbols):
    assert why_no_triton() == ""
    logits, targets, weight = problem(300, symbols, dtype, "cuda")
    plain = logits.clone()
    expected = plain_logit_gradients_(plain, targets, weight, True)
    torch.testing.assert_close(logit_gradients_(logits.clone(), targets, weight, False), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logit_gradients_(logits, targets, weight, True), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-7)
    assert logit_gradients_(logits[:0], targets[:0], weight[:0], True).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_positions_on_a_gpu_equal_those_on_the_host():
    weight = torch.rand(8, 1000, generator=seeded()) * (torch.rand(8, 1000, generator=seeded(1)) < 0.3)
    for each in (weight, torch.zeros(2, 3)):
        assert torch.equal(Positions(each.cuda()).index().cpu(), Positions(each).index())
