"""The reveal and remask probabilities of each sampler's steps."""

import pytest
import torch

from adlm.config.schema import Sampling
from adlm.diffusion.masking import remasking_ceiling
from adlm.diffusion.schedules import Cosine, LogLinear
from adlm.errors import UserError
from adlm.sampling.samplers import steps_of

PRESERVING = ("ancestral", "remdm-cap", "remdm-rescale", "remdm-loop")


@pytest.mark.parametrize("sampler", PRESERVING)
@pytest.mark.parametrize("schedule", [LogLinear(), LogLinear(1e-3), Cosine()], ids=str)
def test_the_share_of_visible_tokens_follows_the_schedule(sampler, schedule):
    """visible' = visible (1 - remask) + masked * reveal lands on alpha_s, at every step."""
    steps = steps_of(schedule, Sampling(sampler, steps=50))
    share_after = steps.alpha_t * (1 - steps.remask) + (1 - steps.alpha_t) * steps.reveal
    assert torch.allclose(share_after, steps.alpha_s, atol=1e-12)


@pytest.mark.parametrize("sampler", ["remdm-cap", "remdm-rescale", "remdm-loop"])
def test_remasking_stays_below_its_ceiling(sampler):
    steps = steps_of(LogLinear(), Sampling(sampler, steps=64))
    assert (steps.remask <= remasking_ceiling(steps.alpha_s, steps.alpha_t) + 1e-12).all()
    assert steps.remask.max() > 0


def test_the_loop_has_its_three_parts():
    steps = steps_of(LogLinear(), Sampling("remdm-loop", steps=1000, eta=0.02, t_on=0.55, t_off=0.05, alpha_on=0.9))
    start = steps.t[:-1]
    loop = (start <= 0.55) & (start > 0.05)
    assert torch.equal(steps.remask > 0, loop)
    assert torch.allclose(steps.alpha_t[loop], torch.tensor(0.9).double())
    assert torch.allclose(steps.remask[loop], torch.tensor(0.02).double())
    assert torch.allclose(steps.reveal[loop], torch.tensor(0.02 * 0.9 / 0.1).double())
    assert steps.alpha_t[0] == 0
    assert torch.allclose(steps.alpha_s[-1], torch.tensor(1.0).double())


def test_forward_backward_reveals_twice_as_fast_and_remasks_the_surplus():
    steps = steps_of(LogLinear(), Sampling("forward-backward", steps=10))
    ancestral = steps_of(LogLinear(), Sampling(steps=10))
    assert torch.allclose(steps.reveal[1:-1], (2 * ancestral.reveal[1:-1]).clamp(max=1))
    assert steps.remask[0] == 1  # nothing is visible yet
    assert steps.reveal[-1] == 1  # clipped: it would be 2


def test_forward_backward_never_remasks_more_than_is_visible():
    """At alpha_1 = 1e-3, as in the paper's presets, (alpha_s - alpha_t) / alpha_t is 250."""
    steps = steps_of(LogLinear(1e-3), Sampling("forward-backward", steps=4))
    visible = steps.alpha_t[0] * (1 - steps.remask[0]) + (1 - steps.alpha_t[0]) * steps.reveal[0]
    assert abs(visible - steps.alpha_s[0]) < 2e-3


def test_the_corrector_takes_more_steps_than_requested_and_no_probability_exceeds_one():
    steps = steps_of(LogLinear(), Sampling("dfm", steps=16))
    assert len(steps.reveal) > 16
    assert steps.t[0] == 1
    assert steps.t[-1] <= (1 - 1e-5) / 16 < steps.t[-2]
    assert torch.allclose(steps.reveal[0], torch.tensor(1 / 16).double())
    assert steps.remask[0] == 0
    drift = steps.reveal * (1 - steps.alpha_t) - steps.remask * steps.alpha_t
    assert torch.allclose(drift, steps.alpha_s - steps.alpha_t)  # the net rate is that of ancestral sampling
    assert (steps.reveal <= 1).all()
    assert (steps.remask <= 1).all()


@pytest.mark.parametrize("sampler", [*PRESERVING, "forward-backward", "dfm"])
def test_every_probability_is_between_zero_and_one(sampler):
    for num in (1, 2, 7):
        steps = steps_of(LogLinear(), Sampling(sampler, steps=num))
        for probability in (steps.reveal, steps.remask):
            assert ((probability >= 0) & (probability <= 1)).all()
        assert len(steps.t) == len(steps.reveal) + 1


def test_each_sampler_has_its_own_default_eta():
    assert steps_of(LogLinear(), Sampling("remdm-loop", steps=100)).remask.max() == pytest.approx(0.02)
    assert steps_of(LogLinear(), Sampling("remdm-cap", steps=100)).remask.max() == pytest.approx(0.04)
    assert steps_of(LogLinear(), Sampling("remdm-cap", eta=0.0, steps=100)).remask.max() == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sampler": "remdm-loop", "eta": 0.2}, r"sampling.eta 0.2 is above \(1 - alpha_on\) / alpha_on = 0.1111"),
        ({"sampler": "remdm-loop", "t_on": 0.05, "t_off": 0.5}, r"0 < t_off < t_on < 1"),
        ({"sampler": "dfm", "eta": 0.1}, r"sampling.sampler dfm does not take; try sampling.sampler=remdm-cap"),
        ({"eta": 0.1}, r"sampling.sampler ancestral does not take; try sampling.sampler=remdm-cap"),
    ],
)
def test_incompatible_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        Sampling(**options)
