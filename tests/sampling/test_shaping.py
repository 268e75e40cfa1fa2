"""Temperature, top-k, nucleus and repetition penalty."""

import itertools
from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import real, seeded

import adlm
from adlm.config.schema import Sampling, Schedule
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.sampling.shaping import draw_tokens, nucleus, plain_nucleus, seen_symbols, shape, top_k, without_repeats

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
    drawn = draw_tokens(BELIEFS.log().expand(2, 4), z, positions, real([0.1, 0.9]), Sampling(top_k=2), mask_id=4)
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


def test_a_symbol_that_would_repeat_a_visible_sequence_is_left_out():
    """By trying every symbol at every mask: it is left out if a sequence around it then occurs a second time."""
    mask, num, generator = 4, 3, seeded(0)
    for trial in range(60):
        z = torch.randint(0, 3, (2, 9), generator=generator)
        z[torch.rand(2, 9, generator=generator) < 0.3] = mask
        pad = torch.zeros(2, 9, dtype=torch.bool)
        pad[1, 7:] = trial % 2 == 0
        positions = ((z == mask) & ~pad).flatten().nonzero()[:, 0]
        log_beliefs = torch.randn(len(positions), mask + 1, generator=generator)
        log_beliefs[:, mask] = -torch.inf
        found = without_repeats(log_beliefs, z, positions, mask, num, pad)
        for index, position in enumerate(positions.tolist()):
            row, place = divmod(position, 9)
            ids = z[row, : 7 if pad[row].any() else 9].tolist()
            before = {tuple(ids[i : i + num]) for i in range(len(ids) - num + 1)}
            kept = torch.ones(mask + 1, dtype=torch.bool)
            for symbol in range(mask + 1):
                new = [*ids[:place], symbol, *ids[place + 1 :]]
                around = range(max(0, place - num + 1), min(place, len(ids) - num) + 1)
                kept[symbol] = not any(
                    mask not in new[i : i + num] and tuple(new[i : i + num]) in before for i in around
                )
            kept |= not kept[:mask].any()
            expected = log_beliefs[index].masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
            assert torch.allclose(found[index], expected, atol=1e-6)


@pytest.mark.parametrize(
    "sampler", mostly_slow(["ancestral", "confidence", "left-to-right", "remdm-conf"], "confidence", "remdm-conf")
)
def test_one_token_a_step_no_sequence_is_written_twice(sampler):
    lm = adlm.load()
    options = {"sampler": sampler, "temperature": 0.4, "length": 48, "steps": 2000 if sampler == "ancestral" else 48}

    def repeats(no_repeat):
        [text] = lm.sample(prompt="The", seed=1, no_repeat=no_repeat, **options)
        ids = lm.tokenizer.encode(text)
        return len(ids) - 1 - len({*itertools.pairwise(ids)})

    assert repeats(2) <= 1, "where a word is encoded in another way than it was written"
    assert repeats(0) > 1


def test_no_repeat_is_for_draws_from_beliefs(tiny_config):
    method = method_of(replace(tiny_config, method="sedd", schedule=Schedule(eps=1e-3)))
    with pytest.raises(UserError, match=r"sampling.no_repeat 2 is not for models with method sedd; use 0"):
        method.check_run(torch.zeros(1, 4, dtype=torch.int64), Sampling("ancestral", no_repeat=2), None)


def test_where_every_symbol_would_repeat_something_none_is_left_out():
    log_beliefs = real([[0.5, 0.3, 0.2, 0.0]]).log()
    found = without_repeats(log_beliefs, torch.tensor([[0, 1, 2, 3]]), torch.tensor([3]), 3, 1)
    assert torch.allclose(found, log_beliefs)
