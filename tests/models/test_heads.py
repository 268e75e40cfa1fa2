"""The chunked linear cross-entropy equals the plain form and uses less memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import seeded

from adlm.models.heads import linear_cross_entropy, plain_linear_cross_entropy, score_positions

TOKENS, WIDTH, SYMBOLS = 11, 6, 9


def problem(dtype=torch.float64, device="cpu"):
    """Hidden states, head, targets and weights, one of them 0; no target is symbol 4."""
    draws = seeded()
    tensors = [
        torch.randn(shape, generator=draws, dtype=torch.float64)
        for shape in ((TOKENS, WIDTH), (SYMBOLS, WIDTH), SYMBOLS)
    ]
    hidden, weight, bias = (tensor.to(device, dtype).requires_grad_() for tensor in tensors)
    targets = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 0, 8, 5], device=device)
    token_weight = torch.rand(TOKENS, generator=draws).to(device, dtype)
    token_weight[3] = 0
    return hidden, weight, bias, targets, token_weight


def answers(form, *arguments, scale=1.0, **options):
    """Value, nats and gradients of a form of the cross-entropy."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in arguments[:3]]
    scored = form(*leaves, *arguments[3:], **options)
    (scale * scored.total).backward()
    return [scored.total.detach(), scored.nats, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("excluded", [None, 4])
@pytest.mark.parametrize("rows", [1, 3, TOKENS, 100])
@pytest.mark.parametrize("scale", [1.0, -0.37])
def test_the_chunked_cross_entropy_equals_the_plain_one_gradients_too(excluded, rows, scale):
    chunked = answers(linear_cross_entropy, *problem(), scale=scale, excluded=excluded, rows=rows)
    plain = answers(plain_linear_cross_entropy, *problem(), scale=scale, excluded=excluded)
    for ours, oracle in zip(chunked, plain, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, oracle, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("excluded", [None, 4])
def test_its_gradients_are_those_of_finite_differences(excluded):
    hidden, weight, bias, targets, token_weight = problem()

    def total(*leaves):
        return linear_cross_entropy(*leaves, targets, token_weight, excluded, rows=4).total

    assert torch.autograd.gradcheck(total, (hidden, weight, bias))


def test_the_excluded_symbol_has_no_mass_and_no_gradient():
    *_, by_weight, by_bias = answers(linear_cross_entropy, *problem(), excluded=4)
    assert (by_weight[4] == 0).all()
    assert by_bias[4] == 0


def test_zero_tokens_have_zero_loss_and_zero_gradients():
    hidden, weight, bias, targets, token_weight = problem()
    total, nats, *gradients = answers(linear_cross_entropy, hidden[:0], weight, bias, targets[:0], token_weight[:0])
    assert total == 0
    assert nats.shape == (0,)
    assert all((gradient == 0).all() for gradient in gradients)


def test_only_positions_with_a_weight_are_scored():
    hidden, weight, bias, targets, token_weight = problem()
    head = torch.nn.Linear(WIDTH, SYMBOLS, dtype=torch.float64)
    head.load_state_dict({"weight": weight, "bias": bias})
    scored = score_positions(hidden[None], head, targets[None], token_weight[None])
    plain = plain_linear_cross_entropy(hidden, weight, bias, targets, token_weight)
    torch.testing.assert_close(scored.total, plain.total)
    assert scored.nats[0, 3] == 0
    torch.testing.assert_close(scored.nats[0], plain.nats * (token_weight != 0))


class Largest(TorchDispatchMode):
    """Records the largest number of elements that any operation produced."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        produced = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *produced])
        return result


def test_no_tensor_as_large_as_all_logits_is_created():
    tokens, symbols, rows = 512, 300, 16
    hidden, weight, bias = (torch.randn(s, requires_grad=True) for s in ((tokens, 4), (symbols, 4), symbols))
    targets, token_weight = torch.randint(symbols, (tokens,)), torch.rand(tokens)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, bias, targets, token_weight, rows=rows).total.backward()
    assert seen.elements <= rows * symbols
    with Largest() as seen:
        plain_linear_cross_entropy(hidden, weight, bias, targets, token_weight).total.backward()
    assert seen.elements == tokens * symbols


def bf16_gap(device):
    """Largest errors under autocast against float64, of the chunked and of the plain form."""
    exact = answers(plain_linear_cross_entropy, *problem(), excluded=4)
    gaps = []
    for form, options in ((linear_cross_entropy, {"rows": 4}), (plain_linear_cross_entropy, {})):
        with torch.autocast(device, torch.bfloat16):
            rounded = answers(form, *problem(torch.float32, device), excluded=4, **options)
        gaps.append([(r.cpu().double() - e).abs().max() / e.abs().max() for r, e in zip(rounded, exact, strict=True)])
        assert all(r.dtype == torch.float32 for r in (rounded if form is linear_cross_entropy else rounded[2:]))
    return gaps


def test_under_autocast_it_rounds_like_the_plain_form_and_returns_float32():
    ours, plain = bf16_gap("cpu")
    assert max(ours) < 1e-2
    assert max(ours) < 2 * max(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_is_exact_on_a_gpu_and_under_its_autocast():
    chunked = answers(linear_cross_entropy, *problem(device="cuda"), excluded=4, rows=3)
    plain = answers(plain_linear_cross_entropy, *problem(), excluded=4)
    for ours, oracle in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours.cpu(), oracle, rtol=1e-12, atol=1e-12)
    ours, plain = bf16_gap("cuda")
    assert max(ours) < 1e-2
    assert max(ours) < 2 * max(plain)
