"""The chunked linear cross-entropy equals the plain form and uses less memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import seeded

from adlm.models.heads import Scored, linear_cross_entropy, plain_linear_cross_entropy, score_positions

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


def plain_soft_cross_entropy(hidden, weight, bias, states, token_weight, excluded):
    """-sum_n w_n sum_v p_nv log q_nv by autograd, of the symbols that are not excluded."""
    kept = [symbol for symbol in range(len(bias)) if symbol != excluded]
    p = (states @ weight.T + bias).detach()[:, kept].softmax(dim=-1)
    nats = -(p * (hidden @ weight.T + bias)[:, kept].log_softmax(dim=-1)).sum(dim=-1)
    return Scored((token_weight * nats).sum(), nats.detach())


def soft_problem(dtype=torch.float64, device="cpu"):
    """`problem` with states in place of target ids."""
    hidden, weight, bias, _, token_weight = problem(dtype, device)
    states = torch.randn(TOKENS, WIDTH, generator=seeded(1), dtype=torch.float64).to(device, dtype)
    return hidden, weight, bias, states, token_weight


@pytest.mark.parametrize("excluded", [None, 4])
@pytest.mark.parametrize("rows", [1, 3, TOKENS, None])
def test_targets_that_are_distributions_of_the_same_head_equal_the_plain_form_gradients_too(excluded, rows):
    chunked = answers(linear_cross_entropy, *soft_problem(), scale=-0.37, excluded=excluded, rows=rows)
    plain = answers(plain_soft_cross_entropy, *soft_problem(), scale=-0.37, excluded=excluded)
    for ours, oracle in zip(chunked, plain, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, oracle, rtol=1e-13, atol=1e-13)


def test_a_target_distribution_has_no_gradient_and_its_own_states_are_the_minimum():
    hidden, weight, bias, states, token_weight = soft_problem()
    states.requires_grad_()
    linear_cross_entropy(hidden, weight, bias, states, token_weight, 4).total.backward()
    assert states.grad is None
    total, *_, by_hidden, by_weight, by_bias = answers(
        linear_cross_entropy, hidden, weight, bias, hidden.detach(), token_weight, excluded=4
    )
    assert total > 0  # the entropy
    assert max(float(gradient.abs().max()) for gradient in (by_hidden, by_weight, by_bias)) < 1e-14


def test_one_hot_target_distributions_are_target_ids():
    hidden, _, bias, targets, token_weight = problem()
    weight = torch.eye(SYMBOLS, dtype=torch.float64)
    hidden = torch.randn(TOKENS, SYMBOLS, generator=seeded(2), dtype=torch.float64)
    states = 1000 * torch.eye(SYMBOLS, dtype=torch.float64)[targets]
    soft = answers(linear_cross_entropy, hidden, weight, bias, states, token_weight, excluded=4)
    hard = answers(linear_cross_entropy, hidden, weight, bias, targets, token_weight, excluded=4)
    for ours, oracle in zip(soft, hard, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-13, atol=1e-13)


def test_a_frozen_head_has_no_gradient_from_target_distributions():
    gradients = []
    for trained in (True, False):
        hidden, weight, bias, states, token_weight = soft_problem()
        head = [each.detach().requires_grad_(trained) for each in (weight, bias)]
        linear_cross_entropy(hidden, *head, states, token_weight, 4, rows=3).total.backward()
        gradients.append(hidden.grad)
        assert all((each.grad is not None) == trained for each in head)
    assert torch.equal(*gradients)


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
    for chunked_targets in (targets, torch.randn(tokens, 4)):
        with Largest() as seen:
            linear_cross_entropy(hidden, weight, bias, chunked_targets, token_weight, rows=rows).total.backward()
        assert seen.elements <= rows * symbols
    with Largest() as seen:
        plain_linear_cross_entropy(hidden, weight, bias, targets, token_weight).total.backward()
    assert seen.elements == tokens * symbols


def bf16_gap(device, problem=problem, plain=plain_linear_cross_entropy):
    """Largest errors under autocast against float64, of the chunked and of the plain form."""
    exact = answers(plain, *problem(), excluded=4)
    gaps = []
    for form, options in ((linear_cross_entropy, {"rows": 4}), (plain, {})):
        with torch.autocast(device, torch.bfloat16):
            rounded = answers(form, *problem(torch.float32, device), excluded=4, **options)
        gaps.append([(r.cpu().double() - e).abs().max() / e.abs().max() for r, e in zip(rounded, exact, strict=True)])
        assert all(r.dtype == torch.float32 for r in (rounded if form is linear_cross_entropy else rounded[2:]))
    return gaps


SOFT = (soft_problem, plain_soft_cross_entropy)


@pytest.mark.parametrize("forms", [(), SOFT])
def test_under_autocast_it_rounds_like_the_plain_form_and_returns_float32(forms):
    ours, plain = bf16_gap("cpu", *forms)
    assert max(ours) < 1e-2
    assert max(ours) < 2 * max(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_is_exact_on_a_gpu_and_under_its_autocast():
    chunked = answers(linear_cross_entropy, *problem(device="cuda"), excluded=4, rows=3)
    plain = answers(plain_linear_cross_entropy, *problem(), excluded=4)
    for ours, oracle in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours.cpu(), oracle, rtol=1e-12, atol=1e-12)
    chunked = answers(linear_cross_entropy, *soft_problem(device="cuda"), excluded=4, rows=3)
    plain = answers(plain_soft_cross_entropy, *soft_problem(), excluded=4)
    for ours, oracle in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours.cpu(), oracle, rtol=1e-12, atol=1e-12)
    for forms in ((), SOFT):
        ours, plain = bf16_gap("cuda", *forms)
        assert max(ours) < 1e-2
        assert max(ours) < 2 * max(plain)
