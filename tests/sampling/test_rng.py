"""The categorical draw and the per-row random streams."""

import numpy as np
import pytest
import torch
from worlds import chi_square, real, seeded

from adlm.errors import UserError
from adlm.sampling.rng import RowRng, categorical, plain_categorical


def uniform(num, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(num))


def test_symbols_are_drawn_with_their_probabilities():
    probabilities = real([0.05, 0.0, 0.6, 0.25, 0.1])
    counts = torch.bincount(categorical(probabilities.expand(100_000, 5), uniform(100_000)), minlength=5)
    assert chi_square(counts, 100_000 * probabilities) < 16.3  # 3 degrees of freedom: exceeded once in a thousand seeds


@pytest.mark.parametrize("symbols", [1, 2, 7, 64, 1000, 50_258])
def test_every_symbol_is_drawn_by_the_uniforms_of_its_own_interval(symbols):
    weights = torch.rand(symbols, generator=seeded(), dtype=torch.float64)
    weights[torch.rand(symbols, generator=seeded(1)) < 0.3] = 0
    weights[symbols // 2] = 1.0
    ends = weights.cumsum(dim=0) / weights.sum()
    for symbol in range(0, symbols, max(1, symbols // 50)):
        if weights[symbol] > 0:
            middle = ends[symbol] - weights[symbol] / weights.sum() / 2
            assert categorical(weights, middle) == symbol


def test_a_symbol_of_probability_zero_is_never_drawn_at_either_end():
    probabilities = real([0.0, 0.3, 0.7, 0.0])
    for uniform_number, symbol in ((0.0, 1), (1 - 2**-53, 2), (1.0, 2)):
        assert categorical(probabilities, real(uniform_number)) == symbol


def test_weights_need_not_sum_to_one():
    drawn = categorical(real([1.0, 3.0]).expand(20_000, 2), uniform(20_000))
    assert abs(drawn.double().mean() - 0.75) < 0.02


def test_the_probability_of_a_rare_symbol_is_exact_where_float32_gumbel_noise_lowers_the_temperature():
    """Two symbols, the rare one with q = 1e-6. Both distributions are computed without sampling."""
    q = 1e-6
    # float32 uniforms are the multiples of 2^-24: the distribution of the naive draw over all of them, for both symbols
    noise = -torch.log(-torch.log(torch.arange(1, 2**24, dtype=torch.float32) / 2**24))
    common, rare = noise + np.float32(np.log(1 - q)), noise + np.float32(np.log(q))
    below = torch.searchsorted(common, rare)  # both increase with the uniform number
    naive = below.double().mean() / len(noise)
    assert naive < 0.98 * q  # 3% too low

    low, high = 0.0, 1.0  # ours is monotonic in its uniform too: bisect for where it changes to the rare symbol
    probabilities = real([1 - q, q])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if categorical(probabilities, real(middle)) == 0 else (low, middle)
    assert abs((1 - high) - q) < 1e-9 * q + 2**-53


def test_a_row_draws_the_same_numbers_in_any_batch():
    alone, in_batch = RowRng(7, [5]), RowRng(7, range(10))
    assert np.array_equal(alone.for_positions(0, 12), in_batch.for_positions(5, 12))
    where = torch.zeros(10, 6, dtype=torch.bool)
    where[5, [1, 4]] = True
    where[2] = True
    assert torch.equal(in_batch.at_tokens(where)[-2:], torch.from_numpy(alone.for_tokens(0, 2)))


def test_rows_seeds_and_streams_differ():
    rng = RowRng(0, range(2))
    numbers = [
        *rng.for_positions(0, 4),
        *rng.for_positions(1, 4),
        *rng.for_tokens(0, 4),
        *RowRng(1, [0]).for_positions(0, 4),
    ]
    assert len(set(numbers)) == 16


def test_no_two_seeds_and_rows_share_their_numbers():
    assert not np.array_equal(RowRng(2**32 + 5, [0]).for_tokens(0, 4), RowRng(5, [1]).for_tokens(0, 4))


def test_unselected_positions_get_a_number_above_every_probability():
    where = torch.tensor([[True, False, True]])
    uniforms = RowRng(0, [0]).at_positions(where)
    assert (uniforms[where] < 1).all()
    assert uniforms[0, 1] == 1


def test_a_negative_seed_is_refused():
    with pytest.raises(UserError, match=r"seed -1 must be 0 or more"):
        RowRng(-1, [0])


def test_rows_with_seeds_of_their_own_draw_as_in_batches_of_one_seed():
    mixed = RowRng([7, 3], [5, 0])
    assert np.array_equal(mixed.for_tokens(0, 9), RowRng(7, [5]).for_tokens(0, 9))
    assert np.array_equal(mixed.for_positions(1, 9), RowRng(3, range(4)).for_positions(0, 9))


@pytest.mark.parametrize("seed", [7, [7, 3, 7, 3]], ids=["one seed", "a seed for each row"])
def test_a_slice_has_the_streams_of_its_rows_from_their_beginning(seed):
    rng = RowRng(seed, [5, 0, 2, 9])
    first = rng.for_tokens(2, 4)
    part = rng[2:]
    assert list(part.rows) == [2, 9]
    assert np.array_equal(part.for_tokens(0, 4), first), "although the stream of this row has moved on"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symbols", [1, 5, 2048, 2049, 49_153])
def test_on_a_gpu_the_kernels_draw_the_symbols_of_the_plain_form(symbols, dtype):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, symbols, generator=generator, dtype=dtype) ** 9
    weights[:, torch.rand(symbols, generator=generator) < 0.3] = 0.0
    weights[:, symbols // 2] = 1e-3
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    drawn = categorical(weights.cuda(), uniforms.cuda()).cpu()
    assert drawn.tolist() == plain_categorical(weights, uniforms).tolist()
    alone = [int(categorical(weights[row : row + 1].cuda(), uniforms[row : row + 1].cuda())) for row in range(4)]
    assert alone == drawn[:4].tolist()
