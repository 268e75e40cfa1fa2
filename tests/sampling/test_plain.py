"""Laws of the plain walk, against the same walk as a product of matrices."""

import itertools

import pytest
import torch
from worlds import World, seeded

from adlm.diffusion.masking import remasking_ceiling
from adlm.diffusion.schedules import LogLinear
from adlm.diffusion.times import grid
from adlm.sampling.plain import REMASKING, subs_transition, walk

STEPS = 4


def lookup(world, beliefs):
    """The beliefs of a world's table as a denoiser."""
    places = world.num_symbols ** torch.arange(world.length - 1, -1, -1)
    return lambda z, t: beliefs[(z * places).sum(dim=1)]


def walks(
    world, beliefs, sampler="ancestral", eta=0.0, num=40_000, t_end=0.0, final="draw", schedule=None, canvas=None
):
    times = grid(STEPS, t_end)
    if canvas is None:
        canvas = torch.full((num, world.length), world.mask_id)
    sigma, told = REMASKING[sampler], lookup(world, beliefs)
    transition = subs_transition(told, world.mask_id, lambda ceiling: sigma(eta, ceiling))
    alphas = (schedule or LogLinear()).alpha(times)
    return list(walk(transition, told, canvas, world.mask_id, times, alphas, final, seeded()))


def law(world, beliefs, sampler, eta, t_end):
    """The distribution of final texts, by enumeration."""
    times = grid(STEPS, t_end)
    alpha = LogLinear().alpha(times)
    state = (world.states == world.mask_id).all(dim=1).double()
    for alpha_t, alpha_s in itertools.pairwise(alpha):
        sigma = REMASKING[sampler](eta, remasking_ceiling(alpha_s, alpha_t))
        state = state @ world.step(beliefs, alpha_s, alpha_t, sigma)
    return state @ world.last_word(beliefs)


@pytest.mark.parametrize(
    ("sampler", "eta", "t_end"),
    [("ancestral", 0.0, 0.0), ("ancestral", 0.0, 0.3), ("remdm-cap", 0.3, 0.0), ("remdm-rescale", 0.7, 0.1)],
)
def test_final_texts_have_the_law_of_the_chain(sampler, eta, t_end):
    world = World.random(words=2, length=2)
    beliefs = world.random_beliefs()
    texts = walks(world, beliefs, sampler, eta, t_end=t_end)[-1].ids
    counts = torch.bincount((texts * torch.tensor([2, 1])).sum(dim=1), minlength=4)
    expected = len(texts) * law(world, beliefs, sampler, eta, t_end)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: once in a thousand seeds


def test_tokens_given_on_the_canvas_stay():
    world = World.random(words=3, length=3)
    canvas = torch.tensor([[world.mask_id, 2, world.mask_id]]).expand(500, 3)
    frames = walks(world, world.random_beliefs(), "remdm-rescale", 0.9, canvas=canvas)
    assert all((frame.ids[:, 1] == 2).all() for frame in frames)
    assert any(frame.remasked.any() for frame in frames)
    assert (frames[-1].ids != world.mask_id).all()


def test_frames_tell_exactly_what_changed():
    world = World.random()
    frames = walks(world, world.random_beliefs(), "remdm-cap", 0.5, num=200)
    assert (frames[0].t == 1).all()
    assert (frames[0].ids == world.mask_id).all()
    for before, after in itertools.pairwise(frames):
        was, now = before.ids == world.mask_id, after.ids == world.mask_id
        assert (after.t <= before.t).all()
        assert torch.equal(after.revealed, was & ~now)
        assert torch.equal(after.remasked, ~was & now)
        kept = ~(after.revealed | after.remasked)
        assert torch.equal(before.ids[kept], after.ids[kept])


def test_beliefs_are_asked_at_the_time_a_step_begins():
    world = World.random()
    asked, told = [], lookup(world, world.random_beliefs())

    def beliefs(z, t):
        asked.append(float(t))
        return told(z, t)

    times = grid(STEPS, 0.2)
    transition = subs_transition(beliefs, world.mask_id, torch.zeros_like)
    canvas = torch.full((9, world.length), world.mask_id)
    list(walk(transition, beliefs, canvas, world.mask_id, times, LogLinear().alpha(times), "draw", seeded()))
    assert asked == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])  # and once more for what is left at the end


def test_ancestral_sampling_locks_in_what_it_reveals():
    world = World.random()
    frames = walks(world, world.random_beliefs(), num=500)
    assert not any(frame.remasked.any() for frame in frames)
    assert len(frames) == STEPS + 1  # at t = 0 nothing is masked, so there is no final pass


def test_the_final_pass_takes_the_likeliest_token_where_it_is_asked_to():
    world = World.random(words=3, length=1)
    beliefs = world.random_beliefs()
    frames = walks(world, beliefs, num=2000, t_end=0.5, final="argmax")
    last = frames[-1]
    assert last.revealed.any()
    assert (last.ids[last.revealed] == beliefs[world.mask_id, 0].argmax()).all()
