"""Properties of the EMA of the weights."""

import pytest
import torch
from worlds import real

from adlm.training.step import EMA


def one_weight(value: float) -> torch.nn.Module:
    network = torch.nn.Linear(1, 1, bias=False).double()
    network.weight.data.fill_(value)
    return network


def test_the_ema_is_that_of_the_released_code():
    """shadow -= (1 - d)(shadow - w), d = min(.9999, (1 + n) / (10 + n)), n counted from 1."""
    network = one_weight(1.0)
    ema, shadow = EMA(network, 0.9999), 1.0
    for n in range(1, 50):
        network.weight.data.fill_(n % 7 - 2.5)
        ema.update(network)
        shadow -= (1 - min(0.9999, (1 + n) / (10 + n))) * (shadow - (n % 7 - 2.5))
        assert float(ema.weights["weight"]) == pytest.approx(shadow, rel=1e-12)
    first = EMA(one_weight(0.0), 0.9999)
    first.update(one_weight(1.0))
    assert float(first.weights["weight"]) == pytest.approx(9 / 11)


def test_after_many_updates_the_decay_is_the_maximum():
    ema = EMA(one_weight(0.0), 0.9)
    ema.num_updates.fill_(1_000)
    ema.update(one_weight(1.0))
    assert float(ema.weights["weight"]) == pytest.approx(0.1)


def test_with_a_maximal_decay_of_zero_the_ema_is_the_weights():
    ema = EMA(one_weight(3.0), 0.0)
    ema.update(one_weight(5.0))
    assert ema.weights["weight"] == real(5.0)


def test_a_skipped_step_does_not_update_the_ema():
    skipping, plain = (EMA(one_weight(1.0), 0.9999) for _ in range(2))
    for n in range(1, 10):
        skipping.update(one_weight(n), torch.tensor(n % 3 != 0))
        if n % 3 != 0:
            plain.update(one_weight(n))
    assert int(skipping.num_updates) == 6
    assert torch.equal(skipping.weights["weight"], plain.weights["weight"])


def test_the_network_has_the_ema_inside_the_context_and_exactly_its_own_weights_after_it():
    network = torch.nn.Linear(5, 3)
    ema = EMA(network, 0.5)
    network.weight.data.mul_(1.7)
    ema.update(network)
    own, averaged = network.weight.detach().clone(), ema.weights["weight"].clone()
    with ema.in_place_of_weights(network):
        assert torch.equal(network.weight, averaged)
    assert torch.equal(network.weight, own)
    assert torch.equal(ema.weights["weight"], averaged)


def test_a_restored_ema_continues_like_the_uninterrupted_one():
    """Restored as a checkpoint does: the weights are copied and the number of updates is set."""
    uninterrupted = EMA(one_weight(1.0), 0.99)
    uninterrupted.update(one_weight(2.0))
    restored = EMA(one_weight(0.0), 0.99)
    restored.weights["weight"].copy_(uninterrupted.weights["weight"])
    restored.num_updates.fill_(1)
    for ema in (uninterrupted, restored):
        ema.update(one_weight(-3.0))
    assert torch.equal(uninterrupted.weights["weight"], restored.weights["weight"])
