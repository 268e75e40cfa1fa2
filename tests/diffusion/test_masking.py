"""The forward process and its reversals, by enumeration."""

import pytest
import torch
from worlds import World, batch_rng, real

from adlm.diffusion.masking import mask_counted, mask_tokens, posterior, remasking_ceiling, reveal_chance

STEPS = [(0.3, 0.1), (0.9, 0.2), (1.0, 0.6), (0.5, 0.0), (1.0, 0.0)]
every_step = pytest.mark.parametrize(("alpha_s", "alpha_t"), [[real(a) for a in s] for s in STEPS])


def test_each_token_is_masked_independently_with_the_probability_of_its_row():
    x = torch.arange(4).repeat(2, 20_000)
    z = mask_tokens(x, torch.tensor([[0.2], [0.7]]), mask_id=9, rng=batch_rng())
    masked = z == 9
    assert (z[~masked] == x[~masked]).all()
    for row, probability in zip(masked.float(), (0.2, 0.7), strict=True):
        assert abs(row.mean() - probability) < 0.01  # standard error .0016
        assert abs((row[1:] * row[:-1]).mean() - probability**2) < 0.01


def test_counted_masks_are_as_many_as_asked_for_and_every_set_is_equally_likely():
    x = torch.arange(1, 5).expand(6000, 4)
    text = torch.tensor([True, True, False, True]).expand_as(x)
    z, share = mask_counted(x, text, torch.full((6000,), 0.5).double(), 0, batch_rng())
    assert torch.equal(share, torch.full((6000,), 2 / 3, dtype=torch.float64))
    patterns, counts = (z == 0).long().unique(dim=0, return_counts=True)
    assert patterns.tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]]
    assert (counts - 2000).abs().max() < 4 * (6000 * 2 / 9) ** 0.5


def test_everything_or_nothing_is_masked_at_the_ends():
    x = torch.arange(1000)[None]
    assert (mask_tokens(x, torch.tensor([[1.0]]), 1000, batch_rng()) == 1000).all()
    assert (mask_tokens(x, torch.tensor([[0.0]]), 1000, batch_rng()) == x).all()


@every_step
def test_the_posterior_is_bayes_rule(alpha_s, alpha_t):
    """q(z_s | z_t, x) = q(z_t | z_s) q(z_s | x) / q(z_t | x), by enumeration of one token."""
    x, mask_id = torch.tensor([[1]]), 3
    for z_t in (1, mask_id):
        prior = torch.zeros(4, dtype=torch.float64)
        prior[1], prior[mask_id] = alpha_s, 1 - alpha_s
        likelihood = torch.zeros(4, dtype=torch.float64)  # q(z_t | z_s): a mask stays, a token is kept alpha_t/alpha_s
        likelihood[1] = alpha_t / alpha_s if z_t == 1 else 1 - alpha_t / alpha_s
        likelihood[mask_id] = float(z_t == mask_id)
        joint = prior * likelihood
        if joint.sum() == 0:
            continue  # nothing is visible at alpha_t = 0
        truth = torch.nn.functional.one_hot(x, 4).double()
        ours = posterior(torch.tensor([[z_t]]), truth, alpha_s, alpha_t, mask_id)[0, 0]
        torch.testing.assert_close(ours, joint / joint.sum())


@every_step
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_remasking_up_to_the_ceiling_preserves_the_marginal(alpha_s, alpha_t, fraction):
    """sum over z_t of q(z_t | x) p(z_s | z_t, x) = q(z_s | x), for every state of two tokens."""
    world = World.random(words=2, length=2)
    sigma = fraction * remasking_ceiling(alpha_s, alpha_t)
    at_s, at_t = world.forward_probabilities(alpha_s), world.forward_probabilities(alpha_t)
    for text in range(len(world.texts)):
        truth = (
            torch.nn.functional.one_hot(world.texts[text], world.num_symbols).double().expand(len(world.states), -1, -1)
        )
        carried = at_t[text] @ world.step(truth, alpha_s, alpha_t, sigma)
        torch.testing.assert_close(carried, at_s[text])


@every_step
def test_the_ceiling_is_the_largest_sigma_with_valid_probabilities(alpha_s, alpha_t):
    ceiling = remasking_ceiling(alpha_s, alpha_t)
    assert 0 <= ceiling <= 1
    assert 0 <= reveal_chance(alpha_s, alpha_t, ceiling) <= 1 + 1e-12
    if ceiling < 1:
        assert reveal_chance(alpha_s, alpha_t, ceiling + 1e-3) > 1
    torch.testing.assert_close(remasking_ceiling(torch.tensor(0.4), torch.tensor(0.0)), torch.tensor(1.0))


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_a_reverse_step_is_a_distribution_and_visible_tokens_stay_or_are_remasked(sigma):
    world = World.random()
    alpha_s, alpha_t = real(0.5), real(0.4)
    step = posterior(world.states, world.random_beliefs(), alpha_s, alpha_t, world.mask_id, sigma)
    torch.testing.assert_close(step.sum(dim=-1), torch.ones(world.states.shape, dtype=torch.float64))
    assert (step >= 0).all()
    visible = world.states != world.mask_id
    stays = step.gather(-1, world.states[..., None])[..., 0]
    torch.testing.assert_close(stays[visible], torch.full_like(stays[visible], 1 - sigma))
    torch.testing.assert_close(step[..., world.mask_id][visible], torch.full_like(stays[visible], sigma))


def test_the_toy_of_the_paper_gives_its_two_numbers():
    """Appendix A.3.4: (1,0,0) with .9, (0,1,1) with .1; from the fully masked z at 2/3, P((m,0,m) at 1/3)."""
    world = World(2, 3, torch.tensor([0, 0, 0, 0.1, 0.9, 0, 0, 0], dtype=torch.float64))
    assert world.texts[4].tolist() == [1, 0, 0]
    assert world.texts[3].tolist() == [0, 1, 1]
    blank = (world.states == world.mask_id).all(dim=1)
    wanted = (world.states == torch.tensor([2, 0, 2])).all(dim=1)
    alpha_s, alpha_t = real(2 / 3), real(1 / 3)
    beliefs = world.exact_beliefs().nan_to_num(0.5)  # states no text can reach; they are not used
    known = beliefs.clone()
    known[blank, 1] = real([1.0, 0, 0])  # the anchor, position 2, is known to be 0
    for given, probability in ((beliefs, 0.1125), (known, 0.125)):
        assert world.step(given, alpha_s, alpha_t)[blank, wanted].item() == pytest.approx(probability, abs=1e-12)
