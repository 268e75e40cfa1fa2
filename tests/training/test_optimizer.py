"""Properties of the optimizer and the learning rate."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from worlds import randomized, seeded

from adlm.config.schema import Model, Train
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.models.transformer import Transformer
from adlm.training.optimizer import (
    DECAYS,
    build_optimizer,
    check_warm_up,
    learning_rate,
    orthogonalized,
    set_learning_rate,
    update_weights,
)

SCHEDULE = Train(steps=1_000, warm_up_steps=100, learning_rate=2e-3)


def test_the_rate_warms_up_linearly_from_zero_and_is_then_constant():
    rates = [learning_rate(SCHEDULE, step) for step in range(1_001)]
    assert rates[:101] == pytest.approx([2e-3 * step / 100 for step in range(101)])
    assert set(rates[100:]) == {2e-3}


@pytest.mark.parametrize(("decay", "halfway"), [("cosine", 1e-3), ("linear", 1e-3), ("trapezoid", 2e-3)])
def test_a_decaying_rate_never_rises_again_and_ends_at_zero(decay, halfway):
    rates = [learning_rate(replace(SCHEDULE, decay=decay), step) for step in range(1_201)]
    assert rates[100] == 2e-3
    assert rates[550] == pytest.approx(halfway)
    assert all(later <= earlier for earlier, later in pairwise(rates[100:]))
    assert rates[1_000:] == pytest.approx([0] * 201)


def test_cosine_decay_is_above_linear_decay_first_and_below_it_later():
    cosine, linear = (
        [learning_rate(replace(SCHEDULE, decay=decay), step) for step in (300, 800)] for decay in ("cosine", "linear")
    )
    assert cosine[0] > linear[0]
    assert cosine[1] < linear[1]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 2_000, 1_000_000])
def test_the_default_warm_up_reaches_the_learning_rate(decay, steps):
    train = Train(steps=steps, decay=decay)
    check_warm_up(train)
    assert learning_rate(train, train.num_warm_up_steps) == train.learning_rate
    assert (learning_rate(train, 0) == 0) == (steps >= 10)


def test_a_warm_up_that_does_not_end_is_rejected_with_a_remedy():
    with pytest.raises(UserError, match=r"warm_up_steps 2500 does not end within train.steps 2000.*warm_up_steps=200$"):
        check_warm_up(Train(steps=2_000, warm_up_steps=2_500))
    with pytest.raises(UserError, match="does not end"):
        check_warm_up(Train(steps=10, warm_up_steps=10))
    check_warm_up(Train(steps=10, warm_up_steps=9))


OWN_WEIGHTS = ("logits", "hidden", "mixture", "hidden-plus-input")
"""The bridges that have some."""


@pytest.mark.parametrize(
    ("part", "options", "train"),
    [
        *(("denoiser.bridge.", {"bridge": bridge}, Train(bridge_rate=0.25, epsilon=1e-300)) for bridge in OWN_WEIGHTS),
        ("chain.", {"block_length": 4, "chain": 6}, Train(chain_rate=0.25, epsilon=1e-300)),
    ],
)
def test_only_bridge_and_chain_have_their_own_learning_rate(tiny_config, part, options, train):
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    config = replace(tiny_config, model=replace(tiny_config.model, **options))
    network = randomized(method_of(config).build().double())
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    optimizer = build_optimizer(network, train)
    set_learning_rate(optimizer, 1e-2)
    for weight in network.parameters():
        weight.grad = torch.randn(weight.shape, generator=seeded(), dtype=torch.float64)
    optimizer.step()
    slowed = set()
    for name, weight in network.named_parameters():
        change = (weight - before[name]).abs()
        slow = bool((change < 5e-3).all())
        torch.testing.assert_close(change, torch.full_like(change, 2.5e-3 if slow else 1e-2))
        slowed |= {name} if slow else set()
    assert slowed == {name for name in before if name.startswith(part)} != set()


def test_without_a_bridge_every_weight_is_in_one_group(mdlm_config):
    network = method_of(mdlm_config).build()
    (group,) = build_optimizer(network, Train(bridge_rate=0.1)).param_groups
    assert len(group["params"]) == len(list(network.parameters()))


def test_the_options_reach_adamw(tiny_config):
    """Two steps by hand: decoupled decay, both moments, epsilon."""
    train = Train(beta1=0.8, beta2=0.7, epsilon=0.3, weight_decay=0.5)
    network = torch.nn.Linear(1, 1, bias=False).double()
    w, g, rate = float(network.weight.detach()), 0.4, 0.1
    optimizer = build_optimizer(network, train)
    expected = w
    mean = square = 0.0
    for n in (1, 2):
        set_learning_rate(optimizer, rate)
        network.weight.grad = torch.full((1, 1), g).double()
        optimizer.step()
        mean, square = 0.8 * mean + 0.2 * g, 0.7 * square + 0.3 * g * g
        expected -= rate * 0.5 * expected
        expected -= rate * (mean / (1 - 0.8**n)) / ((square / (1 - 0.7**n)) ** 0.5 + 0.3)
    assert float(network.weight.detach()) == pytest.approx(
        expected, rel=1e-7, abs=1e-8
    )  # the fused kernel takes its options in float32


def matrix(*shape):
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(8, 8), (6, 24), (24, 6)])
def test_orthogonalized_matrices_have_singular_values_near_one_and_keep_their_singular_vectors(shape):
    given = matrix(*shape)
    [found] = orthogonalized(given[None])
    found = found / (0.2 * max(shape) ** 0.5)
    assert 0.6 < torch.linalg.svdvals(found).min() <= torch.linalg.svdvals(found).max() < 1.3
    u, _, vt = torch.linalg.svd(given, full_matrices=False)
    inner = u.mT @ found @ vt.mT
    torch.testing.assert_close(inner, inner.diagonal().diag(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", [(12, 4), (9, 5), (24, 4)])
def test_matrices_are_orthogonalized_one_by_one(shape):
    given = torch.stack([matrix(*shape), matrix(*shape).flip(0)])
    for whole, found in zip(given, orthogonalized(given, parts=3), strict=True):
        alone = torch.cat([orthogonalized(part[None])[0] for part in whole.chunk(3)])
        torch.testing.assert_close(found, alone)


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(tiny_config):
    network = method_of(replace(tiny_config, model=replace(tiny_config.model, qk_norm=True))).build()
    optimizer = build_optimizer(network, Train(optimizer="muon"))
    parts = {weight: group["parts"] for group in optimizer.param_groups for weight in group["params"]}
    kinds = {name: parts[weight] for name, weight in network.named_parameters()}
    assert len(kinds) == len(parts), "every weight is in one group"
    for name, kind in kinds.items():
        words = name.split(".")
        in_block = "blocks" in words and words[-1] == "weight" and words[-2] in ("qkv", "out", "widen", "narrow")
        assert kind == (3 if "qkv" in words else 1) * in_block, name
    assert {kinds["anchor.trunk.blocks.0.qkv.weight"], kinds["denoiser.trunk.blocks.0.narrow.weight"]} == {1, 3}


def test_muon_moves_like_the_one_of_torch():
    """torch.optim.Muon iterates in bfloat16, so its updates are about 1% off. It updates one matrix after the other."""
    sizes = ((12, 8), (8, 12), (12, 8))
    blocks = torch.nn.ModuleList(torch.nn.Linear(*size, bias=False) for size in sizes)
    weights = [block.weight for block in blocks]
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    network = torch.nn.ModuleDict({"trunk": torch.nn.ModuleDict({"blocks": blocks})})
    ours = build_optimizer(network, Train(optimizer="muon", learning_rate=0.05, weight_decay=0.3))
    theirs = torch.optim.Muon(others, lr=0.05, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    generator = seeded()
    for _ in range(4):
        before = [weight.detach().clone() for weight in weights]
        for weight, other in zip(weights, others, strict=True):
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad, other.grad = 3 * gradient, gradient
        update_weights(ours, torch.tensor(3.0), torch.tensor(True), clip=1.0)
        theirs.step()
        for weight, other, old in zip(weights, others, before, strict=True):
            torch.testing.assert_close(weight, other, atol=0.003, rtol=0)
            size = (weight.detach() - old).square().mean().sqrt()
            assert 0.6 < size / (0.05 * 0.2) < 1.5, "AdamW's usual size"


def test_muon_of_a_network_without_blocks_of_ours_is_a_user_error():
    with pytest.raises(UserError, match=r"train\.optimizer muon"):
        build_optimizer(torch.nn.Linear(2, 2), Train(optimizer="muon"))


def test_muon_updates_queries_keys_and_values_of_a_llama_block_one_by_one():
    model = Model(family="llama", hidden=16, heads=4, kv_heads=2, blocks=1, tie_embedding=True)
    network = Transformer(model, 11, causal=True, modulated=False)
    optimizer = build_optimizer(network, Train(optimizer="muon"))
    matrices = [weight for group in optimizer.param_groups if group["parts"] for weight in group["params"]]
    assert {id(weight) for weight in matrices} == {
        id(weight) for name, weight in network.named_parameters() if ".blocks." in name and weight.ndim == 2
    }
    assert [group["parts"] for group in optimizer.param_groups] == [0, 1]
