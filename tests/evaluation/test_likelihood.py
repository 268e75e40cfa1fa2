"""Laws of the estimate: the mean a token, its standard error, and the difference of two models on the same draws."""

import numpy as np
import pytest
import torch

from adlm.evaluation.likelihood import RowNats, difference, estimate, row_nats


def test_the_estimate_is_of_tokens_not_of_rows():
    found = estimate(RowNats(np.array([10.0, 2.0]), np.array([10, 1])))
    assert found.nats == pytest.approx(12 / 11)


def test_the_standard_error_is_that_of_many_repetitions():
    draws = np.random.default_rng(0)
    tokens = np.full(200, 16)
    means = [estimate(RowNats(draws.gamma(4.0, 8.0, 200), tokens)).nats for _ in range(400)]
    told = estimate(RowNats(draws.gamma(4.0, 8.0, 200), tokens)).stderr
    assert told == pytest.approx(np.std(means), rel=0.2)


def test_what_two_models_share_goes_away_in_their_difference():
    draws = np.random.default_rng(0)
    tokens = np.full(100, 16)
    noise = draws.normal(64, 20, 100)
    ours, theirs = RowNats(noise - 1.6, tokens), RowNats(noise, tokens)
    gap = difference(ours, theirs)
    assert gap.nats == pytest.approx(-0.1)
    assert gap.stderr < 1e-9 < estimate(ours).stderr


def test_every_model_meets_the_same_draws_and_padding_counts_for_nothing():
    x = torch.zeros(3, 4, dtype=torch.long)
    pad = torch.zeros(3, 4, dtype=torch.bool)
    pad[2, 2:] = True
    seeds = []

    def bound(x, pad, seed):
        seeds.append(seed)
        return torch.full(x.shape, float(seed)) * (~pad if pad is not None else 1)

    found = row_nats(bound, [(x, None), (x, pad)], 2)
    assert seeds == [0, 1, 2, 3]
    assert found.tokens.tolist() == [4, 4, 4, 4, 4, 2]
    assert found.nats.tolist() == [2.0, 2.0, 2.0, 10.0, 10.0, 5.0]
