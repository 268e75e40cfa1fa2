"""Laws of the categorical draw."""

import torch
from worlds import real, seeded

from adlm.sampling.draws import draw


def test_symbols_are_drawn_with_their_probabilities():
    chances = real([0.05, 0.0, 0.6, 0.25, 0.1])
    drawn = draw(chances.expand(100_000, 5), seeded())
    counts = torch.bincount(drawn, minlength=5)
    expected = 100_000 * chances
    chi_square = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert counts[1] == 0
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded once in a thousand seeds


def test_a_symbol_of_probability_zero_is_never_drawn_at_either_end(monkeypatch):
    chances = real([0.0, 0.3, 0.7, 0.0])
    for point, symbol in ((0.0, 1), (1 - 2**-53, 2), (1.0, 2)):
        monkeypatch.setattr(torch, "rand", lambda *args, point=point, **kwargs: torch.full((1,), point).double())
        assert draw(chances, seeded()) == symbol


def test_a_tail_too_thin_for_float32_is_still_drawn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.full((1,), 1 - 5e-10).double())
    assert draw(real([1 - 1e-9, 1e-9]), seeded()) == 1


def test_weights_need_not_sum_to_one():
    drawn = draw(real([1.0, 3.0]).expand(20_000, 2), seeded())
    assert abs(drawn.double().mean() - 0.75) < 0.02
