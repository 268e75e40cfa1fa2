"""SUBS beliefs."""

import pytest
import torch
from worlds import seeded

from adlm.diffusion.beliefs import subs


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
