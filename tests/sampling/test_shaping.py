"""Temperature, top-k, nucleus and repetition penalty."""

import pytest
import torch
from worlds import real, seeded

from adlm.config.schema import Sampling
from adlm.sampling.shaping import draw_tokens, nucleus, plain_nucleus, seen_symbols, shape, top_k

BELIEFS = real([[0.5, 0.3, 0.15, 0.05]])


@pytest.mark.parametrize(
    ("p", "crossing", "kept"),
    [
        (0.7, False, [0]),  # 0.5 + 0.3 passes 0.7: the crossing token is dropped
        (0.7, True, [0, 1]),
        (0.8, False, [0, 1]),
        (0.3, False, [0]),  # always at least the likeliest
        (0.3, True, [0]),
        (0.96, False, [0, 1, 2]),
        (0.96, True, [0, 1, 2, 3]),
    ],
)
def test_both_conventions_of_the_nucleus(p, crossing, kept):
    shaped = nucleus(BELIEFS[:, [2, 0, 3, 1]], p, crossing)[:, [1, 3, 0, 2]]  # for any order of symbols
    expected = torch.zeros_like(BELIEFS)
    expected[0, kept] = BELIEFS[0, kept] / BELIEFS[0, kept].sum()
    assert torch.allclose(shaped, expected)


def test_top_k_keeps_k_and_normalises():
    assert torch.allclose(top_k(BELIEFS, 2), real([[0.625, 0.375, 0.0, 0.0]]))


def test_temperature_raises_beliefs_to_the_power_of_its_inverse():
    shaped = shape(BELIEFS.log(), Sampling(temperature=0.5))
    assert torch.allclose(shaped, BELIEFS**2 / (BELIEFS**2).sum())


def test_at_temperature_zero_the_likeliest_is_taken():
    assert torch.equal(shape(BELIEFS.log(), Sampling(temperature=0.0)), real([[1.0, 0.0, 0.0, 0.0]]))


def test_default_options_leave_beliefs_unchanged():
    assert torch.allclose(shape(BELIEFS.log(), Sampling()), BELIEFS)


def test_the_nucleus_applies_after_top_k_and_temperature():
    shaped = shape(BELIEFS.log(), Sampling(top_k=2, top_p=0.7, nucleus="published"))
    assert torch.equal(shaped, real([[1.0, 0.0, 0.0, 0.0]]).to(shaped))


def test_impossible_symbols_stay_impossible():
    log_beliefs = torch.randn(50, 7, generator=seeded()).index_fill(-1, torch.tensor(3), -torch.inf).log_softmax(-1)
    for options in (
        Sampling(temperature=2.0),
        Sampling(top_k=7),
        Sampling(top_p=0.99),
        Sampling(repetition_penalty=2.0),
    ):
        seen = torch.zeros(50, 7, dtype=torch.bool) if options.repetition_penalty > 1 else None
        assert (shape(log_beliefs, options, seen)[:, 3] == 0).all()


def test_the_repetition_penalty_applies_to_symbols_of_the_same_row_only():
    z = torch.tensor([[0, 4], [1, 4]])  # 4 is the mask
    positions = torch.tensor([1, 3])
    seen = seen_symbols(z, positions, 5)
    assert seen.tolist() == [[True, False, False, False, True], [False, True, False, False, True]]
    log_beliefs = real([0.4, 0.4, 0.2, 0.0, 0.0]).log().expand(2, 5)
    shaped = shape(log_beliefs, Sampling(repetition_penalty=2.0), seen)
    assert torch.allclose(shaped[0], real([0.16, 0.4, 0.2, 0.0, 0.0]) / 0.76)
    assert torch.allclose(shaped[1], real([0.4, 0.16, 0.2, 0.0, 0.0]) / 0.76)


def test_the_reported_probability_is_that_of_the_draw():
    z, positions = torch.full((1, 2), 4), torch.tensor([0, 1])
    drawn = draw_tokens(BELIEFS.log().expand(2, 4), z, positions, real([0.1, 0.9]), Sampling(top_k=2))
    assert drawn.tokens.tolist() == [0, 1]
    assert torch.allclose(drawn.chance, torch.tensor([0.625, 0.375]))
    argmax = drawn.with_argmax(torch.tensor([False, True]), BELIEFS.log().expand(2, 4))
    assert argmax.tokens.tolist() == [0, 0]
    assert torch.allclose(argmax.chance, torch.tensor([0.625, 0.5]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("crossing", [True, False])
@pytest.mark.parametrize("p", [0.001, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("symbols", [3, 300, 8192, 49_153])
def test_on_a_gpu_the_kernel_keeps_the_nucleus_of_the_plain_form(symbols, p, crossing):
    beliefs = (4 * torch.randn(32, symbols, generator=seeded(1))).softmax(dim=-1)
    ours, plain = nucleus(beliefs.cuda(), p, crossing).cpu(), plain_nucleus(beliefs, p, crossing)
    torch.testing.assert_close(ours.sum(dim=-1), torch.ones(32))
    assert ((ours > 0) != (plain > 0)).sum(dim=-1).max() <= 1, "by rounding, one symbol may be on the other side"
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("p", "crossing", "num"), [(0.5, True, 50), (0.505, True, 51), (0.505, False, 50)])
def test_on_a_gpu_as_many_equally_likely_symbols_are_kept_as_in_the_plain_form(p, crossing, num):
    beliefs = torch.full((1, 100), 0.01)
    for kept in (nucleus(beliefs.cuda(), p, crossing).cpu(), plain_nucleus(beliefs, p, crossing)):
        assert abs(int((kept > 0).sum()) - num) <= 1, "0.01 is not exact"
