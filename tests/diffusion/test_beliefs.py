"""SUBS beliefs."""

import pytest
import torch
from worlds import seeded

from adlm.diffusion.beliefs import log_softmax, subs


@pytest.mark.parametrize("mask_id", [0, 3, 6])
def test_beliefs_are_distributions_without_mass_on_the_mask_that_copy_what_is_visible(mask_id):
    logits = torch.randn(2, 5, 7, generator=seeded(), dtype=torch.float64)
    z = torch.tensor([[mask_id, 1, mask_id, 2, 5], [mask_id] * 5])
    beliefs = subs(logits, z, mask_id).exp()
    torch.testing.assert_close(beliefs.sum(dim=-1), torch.ones(2, 5, dtype=torch.float64))
    masked = z == mask_id
    assert (beliefs[..., mask_id] == 0).all()
    assert (beliefs.gather(-1, z[..., None])[~masked] == 1).all()


def test_masked_beliefs_are_the_softmax_over_all_but_the_mask():
    logits = torch.randn(1, 1, 5, generator=seeded(), dtype=torch.float64)
    beliefs = subs(logits, torch.tensor([[2]]), mask_id=2).exp()[0, 0]
    others = [0, 1, 3, 4]
    torch.testing.assert_close(beliefs[others], logits[0, 0, others].softmax(dim=-1))


def test_half_precision_logits_are_normalised_in_float32():
    beliefs = subs(torch.zeros(1, 1, 1001, dtype=torch.bfloat16), torch.tensor([[1000]]), 1000)
    assert beliefs.dtype == torch.float32
    assert abs(beliefs.exp().sum().item() - 1) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_the_log_softmax_and_its_gradient_are_those_of_pytorch(dtype, tolerance):
    logits = 5 * torch.randn(3, 1001, generator=seeded(), dtype=torch.float64)
    logits[:, 7] = -torch.inf
    ours, exact = (logits.to(each, copy=True).requires_grad_() for each in (dtype, torch.float64))
    torch.testing.assert_close(log_softmax(ours).double(), exact.log_softmax(dim=-1), rtol=tolerance, atol=tolerance)
    for each, function in ((ours, log_softmax), (exact, lambda x: x.log_softmax(dim=-1))):
        function(each)[:, 3].sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_log_softmax_of_a_row_does_not_depend_on_its_index():
    row = 5 * torch.randn(50_257, generator=seeded())
    together = log_softmax(row.cuda().expand(64, -1).contiguous())
    assert (together == log_softmax(row.cuda()[None])).all()
