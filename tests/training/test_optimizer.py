"""Properties of the optimizer and the learning rate."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from worlds import randomized, seeded

from adlm.config.schema import Train
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.training.step import DECAYS, build_optimizer, check_warm_up, learning_rate, set_learning_rate

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


@pytest.mark.parametrize("bridge", ["logits", "hidden", "mixture", "hidden-plus-input"])
def test_only_the_bridge_has_its_own_learning_rate(tiny_config, bridge):
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    config = replace(tiny_config, model=replace(tiny_config.model, bridge=bridge))
    train = Train(bridge_rate=0.25, epsilon=1e-300)
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
    assert slowed == {name for name in before if name.startswith("denoiser.bridge.")} != set()


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
