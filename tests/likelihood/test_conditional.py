"""Tests of conditional bounds: enumeration, expectation, standard errors, causal models, greedy decoding.

Two to four tokens after a context of three, so that all masks can be enumerated.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import randomized

from adlm.config.schema import Model, Schedule, Time
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.conditional import ConditionalRow, ConditionalSettings, conditional_nats
from adlm.likelihood.conditional_noise import MaskNoise, TimeNoise, noise_model
from adlm.methods import method_of

ROWS = [
    ConditionalRow((1, 2, 3), (4, 5)),
    ConditionalRow((1, 2), (4, 5, 6)),
    ConditionalRow((), (3, 1, 0, 2)),
    ConditionalRow((1, 2, 3), (9,)),
]


def model(config, **changes) -> LanguageModel:
    config = replace(config, **changes)
    method = method_of(config)
    return LanguageModel(config, method, randomized(method.build()).double())


def score(lm, rows, **settings):
    return conditional_nats(lm.method, lm.network, rows, ConditionalSettings(**settings))


def repeated(lm, row, num=75, **settings):
    """nats and standard errors of `num` seeds, in double precision."""
    scores = [score(lm, [row], seed=seed, **settings)[0] for seed in range(num)]
    return torch.tensor([[each.nats, each.stderr] for each in scores], dtype=torch.float64).T


def enumerated(lm, row) -> float:
    """sum over masks S of the continuation of sum_{i in S} -log p(x_i | x without S) / (|S| C(n, |S|))."""
    n, x, total = len(row.continuation), torch.tensor(row.ids), 0.0
    for k in range(1, n + 1):
        for subset in itertools.combinations(range(len(row.context), len(row.ids)), k):
            z = x.clone()
            z[list(subset)] = lm.mask_id
            log_probs = lm.log_probs(z[None])[0]
            total -= sum(float(log_probs[i, x[i]]) for i in subset) / (k * math.comb(n, k))
    return total


@pytest.mark.parametrize("method", ["adlm", "mdlm"])
def test_few_masks_are_enumerated_and_give_the_bound_itself(tiny_config, method):
    lm = model(tiny_config, method=method)
    for row, scored in zip(ROWS, score(lm, ROWS, samples=16), strict=True):
        assert scored.nats == pytest.approx(enumerated(lm, row), rel=1e-6)
        assert scored.stderr == 0


@pytest.mark.parametrize("row", ROWS[1:3], ids=["context", "no context"])
def test_the_mean_of_the_estimator_is_the_enumerated_bound_and_its_stderr_is_honest(mdlm_config, row):
    lm = model(mdlm_config)
    nats, stderrs = repeated(lm, row, samples=4)
    assert abs(nats.mean() - enumerated(lm, row)) < 4 * nats.std() / math.sqrt(len(nats))
    assert stderrs.square().mean().sqrt() == pytest.approx(float(nats.std()), rel=0.25)


@pytest.mark.parametrize("other", [(3, 1, 0, 4), (3, 1, 0)], ids=["the same masks", "another length"])
def test_the_stderr_of_a_gap_is_honest_and_smaller_on_the_same_masks(mdlm_config, other):
    lm, rows = model(mdlm_config), [ROWS[2], ConditionalRow((), other)]
    pairs = [score(lm, rows, samples=4, seed=seed) for seed in range(75)]
    gaps = torch.tensor([first.nats - second.nats for first, second in pairs], dtype=torch.float64)
    squares = [first.gap_stderr(second) ** 2 for first, second in pairs]
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(float(gaps.std()), rel=0.25)
    if len(other) == 4:
        assert sum(squares) < 0.6 * sum(first.stderr**2 + second.stderr**2 for first, second in pairs)


ENDS = (Schedule(eps=0.4), Schedule("geometric", sigma_min=0.1, sigma_max=4.0))  # visible at t = 1, masked at t = 0
SCHEDULES = mostly_slow([*ENDS, Schedule(), Schedule("cosine")], *ENDS)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.eps}")
def test_masks_and_times_estimate_the_same_bound_for_every_schedule(mdlm_config, schedule, monkeypatch):
    """Also where tokens are masked at t = 0 or visible at t = 1."""
    lm = model(mdlm_config, schedule=schedule)
    by_masks = score(lm, ROWS[1:2], samples=16)[0].nats
    monkeypatch.setattr("adlm.likelihood.conditional.noise_model", lambda method: TimeNoise(method))
    by_times, stderrs = repeated(lm, ROWS[1], samples=16)
    assert abs(by_times.mean() - by_masks) < 4 * by_times.std() / math.sqrt(len(by_times))
    assert stderrs.square().mean().sqrt() == pytest.approx(float(by_times.std()), rel=0.3)


CONDITIONED = Model(16, heads=2, blocks=2, condition=8, dropout=0.0, time_conditioning=True)
METHODS = {
    "sedd": {"schedule": Schedule(eps=1e-3), "model": CONDITIONED},
    "d3pm": {"schedule": Schedule(eps=1e-3), "model": CONDITIONED, "time": Time(steps=10)},
    "mdlm": {"time": Time(steps=10)},
}


@pytest.mark.parametrize("method", METHODS)
def test_without_context_it_is_the_bound_of_the_method(tiny_config, method):
    lm = model(tiny_config, method=method, **METHODS[method])
    row = ROWS[2]
    nats, _ = repeated(lm, row, num=20, samples=64)
    x = torch.tensor(row.ids).expand(4096, -1)
    bounds = lm.method.bound(lm.network, x, None, BatchRng(torch.Generator().manual_seed(0))).sum(dim=1)
    tolerance = math.hypot(float(nats.std()) / math.sqrt(len(nats)), float(bounds.std()) / math.sqrt(len(bounds)))
    assert isinstance(noise_model(lm.method), TimeNoise)
    assert abs(nats.mean() - bounds.mean()) < 4 * tolerance


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_scores_are_exact(tiny_config, method):
    lm = model(tiny_config, method=method)
    for row, scored in zip(ROWS, score(lm, ROWS), strict=True):
        log_probs = lm.log_probs(torch.tensor(row.ids)[None])[0]
        predicted = range(max(1, len(row.context)), len(row.ids))
        assert scored.nats == pytest.approx(-sum(float(log_probs[i - 1, row.ids[i]]) for i in predicted))
        assert scored.stderr == 0
        assert scored.greedy == all(int(log_probs[i - 1].argmax()) == row.ids[i] for i in predicted)


@pytest.mark.parametrize("method", ["adlm", "sedd", "d3pm", "ar"])
@pytest.mark.parametrize("pad", ["masked", "attended"])
def test_neither_other_rows_nor_the_batch_size_change_a_score(tiny_config, method, pad):
    lm = model(tiny_config, method=method, data=replace(tiny_config.data, pad=pad), **METHODS.get(method, {}))
    alone = [score(lm, [row], samples=6, batch=1)[0] for row in ROWS]
    for batch in (4, None):
        for one, many in zip(alone, score(lm, ROWS, samples=6, batch=batch), strict=True):
            assert one.nats == pytest.approx(many.nats, rel=1e-6)
            assert one.stderr == pytest.approx(many.stderr, rel=1e-4, abs=1e-9)
            assert one.greedy == many.greedy


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_only_what_the_greedy_sampler_writes_is_greedy(tiny_config, method):
    lm = model(tiny_config, method=method)
    canvas = torch.tensor([1, 2, 3] + [lm.mask_id] * 4)
    options = {"temperature": 0.0, "steps": 8}
    sampler = "left-to-right" if lm.method.causal else "confidence"
    written = lm.complete(canvas, sampler=sampler, **options)[0].tolist()
    rows = [ConditionalRow(tuple(written[:3]), tuple(written[3:]))]
    for position in range(3, 7):
        other = list(written)
        other[position] = (other[position] + 1) % 7
        rows.append(ConditionalRow(tuple(other[:3]), tuple(other[3:])))
    assert [each.greedy for each in score(lm, rows, samples=2)] == [True] + [False] * 4


def test_continuations_of_one_length_get_the_same_masks(mdlm_config):
    model_of_noise = noise_model(method_of(mdlm_config))
    assert isinstance(model_of_noise, MaskNoise)
    first, second, other = (model_of_noise.draw(1, 20, 8, seed) for seed in (0, 0, 1))
    assert first.masked.equal(second.masked)
    assert not first.masked.equal(other.masked)
    assert first.masked.sum(dim=1).unique().numel() > 4  # stratified numbers of masks


def test_no_tokens_cost_nothing(mdlm_config):
    assert score(model(mdlm_config), [ConditionalRow((1, 2), ())])[0].nats == 0


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_samples_come_in_pairs(samples):
    with pytest.raises(UserError, match=f"samples {samples} must be an even number"):
        ConditionalSettings(samples)
