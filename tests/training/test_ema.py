"""Laws of the averaged weights."""

import pytest
import torch
from worlds import real

from adlm.training.ema import EMA


def one_weight(value: float) -> torch.nn.Module:
    network = torch.nn.Linear(1, 1, bias=False).double()
    network.weight.data.fill_(value)
    return network


def test_the_average_is_that_of_the_released_code():
    """shadow -= (1 - d)(shadow - w), d = min(.9999, (1 + n) / (10 + n)), n counted from 1."""
    network = one_weight(1.0)
    average, shadow = EMA(network, 0.9999), 1.0
    for n in range(1, 50):
        network.weight.data.fill_(n % 7 - 2.5)
        average.update(network)
        shadow -= (1 - min(0.9999, (1 + n) / (10 + n))) * (shadow - (n % 7 - 2.5))
        assert float(average.weights["weight"]) == pytest.approx(shadow, rel=1e-12)
    first = EMA(one_weight(0.0), 0.9999)
    first.update(one_weight(1.0))
    assert float(first.weights["weight"]) == pytest.approx(9 / 11)


def test_after_many_updates_the_ceiling_holds():
    average = EMA(one_weight(0.0), 0.9)
    average.num_updates.fill_(1_000)
    average.update(one_weight(1.0))
    assert float(average.weights["weight"]) == pytest.approx(0.1)


def test_a_ceiling_of_zero_is_the_weights():
    average = EMA(one_weight(3.0), 0.0)
    average.update(one_weight(5.0))
    assert average.weights["weight"] == real(5.0)


def test_a_step_that_was_skipped_is_no_update():
    skipping, plain = (EMA(one_weight(1.0), 0.9999) for _ in range(2))
    for n in range(1, 10):
        skipping.update(one_weight(n), torch.tensor(n % 3 != 0))
        if n % 3 != 0:
            plain.update(one_weight(n))
    assert int(skipping.num_updates) == 6
    assert torch.equal(skipping.weights["weight"], plain.weights["weight"])


def test_inside_the_network_is_the_average_and_outside_itself_again_to_the_bit():
    network = torch.nn.Linear(5, 3)
    average = EMA(network, 0.5)
    network.weight.data.mul_(1.7)
    average.update(network)
    own, kept = network.weight.detach().clone(), average.weights["weight"].clone()
    with average.in_place_of_weights(network):
        assert torch.equal(network.weight, kept)
    assert torch.equal(network.weight, own)
    assert torch.equal(average.weights["weight"], kept)


def test_a_restored_average_goes_on_as_the_unbroken_one():
    unbroken, broken = (EMA(one_weight(1.0), 0.99) for _ in range(2))
    for average in (unbroken, broken):
        average.update(one_weight(2.0))
    again = EMA(one_weight(0.0), 0.99)
    again.load_state_dict(broken.state_dict())
    for average in (unbroken, again):
        average.update(one_weight(-3.0))
    assert torch.equal(unbroken.weights["weight"], again.weights["weight"])
