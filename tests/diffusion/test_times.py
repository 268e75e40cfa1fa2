"""Random times and time grids."""

import pytest
import torch
from worlds import batch_rng

from adlm.diffusion.times import BatchSlice, draw_grid_times, draw_times, grid


def test_antithetic_times_lie_one_in_each_stratum():
    t = draw_times(64, batch_rng(), t_min=0.2)
    strata = torch.ceil((t - 0.2) / 0.8 * 64)
    assert sorted(strata.tolist()) == list(range(1, 65))


def test_each_antithetic_time_is_uniform_in_its_stratum():
    times = torch.stack([draw_times(4, batch_rng(seed)) for seed in range(4000)]).sort(dim=1).values
    within = times * 4 - torch.arange(4)
    assert (within.mean(dim=0) - 0.5).abs().max() < 0.02  # standard error .0046
    assert (within.var(dim=0) - 1 / 12).abs().max() < 0.005


def test_the_time_of_every_row_is_uniform():
    """Otherwise the bound of a text would depend on its row in the batch."""
    times = torch.stack([draw_times(4, batch_rng(seed)) for seed in range(4000)])
    assert (times.mean(dim=0) - 0.5).abs().max() < 0.02  # standard error .0046
    assert (times.var(dim=0) - 1 / 12).abs().max() < 0.005


def test_independent_times_do_not_fill_the_strata():
    strata = torch.ceil(draw_times(64, batch_rng(), antithetic=False) * 64)
    assert len(strata.unique()) < 64


def test_time_zero_is_never_drawn_even_where_float32_would_round_to_it(monkeypatch):
    largest = 1 - 2**-24
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.full(shape, largest))
    assert (draw_times(100_000, batch_rng()) > 0).all()
    t, s = draw_grid_times(512, 1000, batch_rng())
    assert t.min() == 1 / 1000
    assert s.min() == 0


def test_grid_times_are_the_steps_of_the_grid_all_equally_likely():
    t, s = draw_grid_times(10 * 100, 10, batch_rng())
    torch.testing.assert_close(t - s, torch.full_like(t, 0.1))
    values, counts = torch.round(t * 10).unique(return_counts=True)
    assert values.tolist() == list(range(1, 11))
    assert (counts - 100).abs().max() <= 1  # one stratum in a hundred per step, up to rounding


def test_the_grid_runs_from_one_to_its_end_in_equal_steps():
    times = grid(5, 1e-5)
    assert times[0] == 1
    assert times[-1] == 1e-5
    torch.testing.assert_close(times.diff(), torch.full((5,), -(1 - 1e-5) / 5, dtype=torch.float64))


@pytest.mark.parametrize("antithetic", [True, False])
def test_micro_batches_draw_the_times_of_the_whole_batch(antithetic):
    whole = draw_times(6, batch_rng(), 0.1, antithetic)
    parts = [draw_times(2, batch_rng(rows=BatchSlice(first, 6)), 0.1, antithetic) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)
    last, _ = draw_grid_times(1, 10, batch_rng(rows=BatchSlice(5, 6)), antithetic)
    assert last == draw_grid_times(6, 10, batch_rng(), antithetic)[0][5]
