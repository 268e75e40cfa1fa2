"""Ordered decoding, by enumeration of all draws, against each order written out by hand and its exact likelihood."""

import itertools

import pytest
import torch
from worlds import FixedRng, Table, World, quarters, real, seeded

from adlm.config.schema import Sampling
from adlm.diffusion.schedules import LogLinear
from adlm.registry import ORDERS
from adlm.sampling.adaptive import anchor_first, certainty, confidence, entropy, margin
from adlm.sampling.frame import KnownText, SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sampler_of, steps_of

UNIFORMS = [0.125, 0.375, 0.625, 0.875]


def score_of(sampler, belief, word, position):
    """The score of one position, given its beliefs and the word drawn there."""
    if sampler in ("confidence", "threshold"):
        return float(belief[word])
    if sampler == "certainty":
        return float(belief.max())
    if sampler == "margin":
        return float((belief[0] - belief[1]).abs())
    if sampler == "entropy":
        return float((belief[:2] * belief[:2].log()).sum())
    return -position


def distribution(world, beliefs, sampler, num, threshold):
    """The distribution of final texts by recursion: draw a word at every mask, reveal the best."""
    index = {tuple(state.tolist()): number for number, state in enumerate(world.states)}
    texts = {tuple(text.tolist()): 0.0 for text in world.texts}

    def recurse(ids, step, weight):
        masks = [position for position in range(world.length) if ids[position] == world.mask_id]
        if not masks:
            texts[ids] += weight
            return
        here = beliefs[index[ids]]
        for words in itertools.product(range(2), repeat=len(masks)):
            probability = weight
            for position, word in zip(masks, words, strict=True):
                probability *= float(here[position][word])
            ranked = sorted(
                zip(masks, words, strict=True),
                key=lambda pair: (-score_of(sampler, here[pair[0]], pair[1], pair[0]), pair[0]),
            )
            if sampler == "threshold":
                chosen = [pair for pair in ranked if here[pair[0]][pair[1]] >= threshold] or ranked[:1]
            else:
                done, goal = world.length - len(masks), world.length * (step + 1) // min(num, world.length)
                chosen = ranked[: goal - done]
            after = list(ids)
            for position, word in chosen:
                after[position] = word
            recurse(tuple(after), step + 1, probability)

    recurse((world.mask_id,) * world.length, 0, 1.0)
    return torch.tensor(list(texts.values()), dtype=torch.float64)


@pytest.mark.parametrize("sampler", ["confidence", "certainty", "margin", "entropy", "threshold", "left-to-right"])
@pytest.mark.parametrize("num", [2, 5])
def test_final_texts_have_the_distribution_of_the_order(sampler, num):
    world = World.random(words=2, length=3)
    beliefs = quarters(world, seed=4)
    ours = over_all_draws(Table(world, beliefs), world, sampler, num, torch.full((3,), world.mask_id))
    assert (ours - distribution(world, beliefs, sampler, num, 0.7)).abs().max() < 1e-12


def over_all_draws(table, world, sampler, num, canvas):
    """The distribution of final texts (8,), by the sampler itself, of a canvas (3,) and beliefs of quarters."""
    sampling = Sampling(sampler, steps=num, threshold=0.7)
    tokens = [list(uniforms) for uniforms in itertools.product(UNIFORMS, repeat=6)]  # at most 3 + 2 + 1 draws
    steps, rng = steps_of(LogLinear(), sampling), FixedRng([[]] * len(tokens), tokens)
    run = SamplingRun(table, canvas.repeat(len(tokens), 1), world.mask_id, steps, sampling, rng)
    *_, last = sampler_of(sampling).sample(run)
    return torch.bincount((last.ids * torch.tensor([4, 2, 1])).sum(dim=1), minlength=8) / len(tokens)


@pytest.mark.parametrize("given", [{}, {1: 0}, {2: 1}])
@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("sampler", ORDERS)
def test_a_known_text_has_the_probability_that_the_sampler_draws_it_with(sampler, num, given):
    world, sampling = World.random(words=2, length=3), Sampling(sampler, steps=num)
    table, steps = Table(world, quarters(world, seed=4), quarters(world, seed=5)), steps_of(LogLinear(), sampling)
    canvas = torch.full((3,), world.mask_id)
    canvas[list(given)] = torch.tensor(list(given.values()), dtype=torch.int64)
    fits = ((world.texts == canvas) | (canvas == world.mask_id)).all(dim=1)
    text = KnownText(world.texts[fits], torch.zeros(int(fits.sum()), 3, dtype=torch.float64))
    rows = canvas.repeat(len(text.ids), 1)
    run = SamplingRun(table, rows, world.mask_id, steps, sampling, RowRng(0, range(len(rows))), text=text)
    *_, last = sampler_of(sampling).sample(run)
    assert torch.equal(last.ids, text.ids)
    probabilities = torch.zeros(8, dtype=torch.float64)
    probabilities[fits] = (-text.nats.sum(dim=1)).exp()
    assert (probabilities - over_all_draws(table, world, sampler, num, canvas)).abs().max() < 1e-12


def test_the_scores_match_their_definitions():
    log_beliefs = real([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]]).log()
    assert torch.allclose(confidence(log_beliefs, torch.tensor([1, 0, 0])), real([0.3, 0.4, 1.0]))
    assert torch.allclose(certainty(log_beliefs, torch.tensor([1, 1, 1])), real([0.5, 0.4, 1.0]))
    assert torch.allclose(margin(log_beliefs, torch.zeros(3)), real([0.2, 0.0, 1.0]))
    assert torch.allclose(entropy(log_beliefs, torch.zeros(3))[2], real(0.0))
    assert entropy(log_beliefs, torch.zeros(3))[0] > entropy(log_beliefs, torch.zeros(3))[1]


def test_masks_are_spread_evenly_over_the_steps():
    world = World.random(words=2, length=5)
    canvas = torch.full((2, 5), world.mask_id)
    canvas[1, 0] = 0
    sampling = Sampling("confidence", steps=3)
    frames = list(
        sampler_of(sampling).sample(
            SamplingRun(
                Table(world, world.random_beliefs()),
                canvas,
                world.mask_id,
                steps_of(LogLinear(), sampling),
                sampling,
                RowRng(0, range(2)),
            )
        )
    )
    assert [frame.revealed.sum(dim=1).tolist() for frame in frames[1:]] == [[1, 1], [2, 1], [2, 2]]
    assert frames[-1].t.tolist() == [0.0, 0.0]
    assert (frames[-1].ids[1, 0] == 0).all()


class Anchors:
    """An anchor network with given beliefs at each position."""

    def __init__(self, beliefs):
        self.beliefs = beliefs

    def anchor_log_beliefs(self, positions):
        return self.beliefs[positions].log()


def test_anchor_first_prefers_a_sure_rare_token_to_a_sure_common_one_and_to_an_unsure_rare_one():
    z = torch.tensor([[0, 0, 0, 4, 4, 4]])
    positions = torch.tensor([3, 4, 5])
    beliefs = torch.zeros(6, 5, dtype=torch.float64)
    beliefs[3] = real([0.9, 0.05, 0.05, 0.0, 0.0])  # sure of the most common token of the row
    beliefs[4] = real([0.05, 0.9, 0.05, 0.0, 0.0])  # sure of something rare
    beliefs[5] = real([0.3, 0.1, 0.4, 0.2, 0.0])  # unsure of something rare
    score = anchor_first(Anchors(beliefs), z, positions, None)
    assert score.argmax() == 1
    assert torch.allclose(score[0], real(0.9) * torch.log(real(6 / 4)))
    assert torch.allclose(score[1], real(0.9) * torch.log(real(6.0)))


def test_padding_does_not_change_the_anchor_first_scores():
    beliefs = torch.rand(5, 4, dtype=torch.float64, generator=seeded())
    beliefs[:, 3] = 0
    beliefs = beliefs / beliefs.sum(dim=1, keepdim=True)
    z = torch.tensor([[0, 3, 3, 1, 1]])
    pad = torch.tensor([[False, False, False, True, True]])
    positions = torch.tensor([1, 2])
    alone = anchor_first(Anchors(beliefs), z[:, :3], positions, None)
    assert torch.equal(anchor_first(Anchors(beliefs), z, positions, pad), alone)


@pytest.mark.parametrize("sampler", ["certainty", "margin", "entropy", "left-to-right"])
def test_an_order_independent_of_the_drawn_token_samples_the_language_at_one_token_a_step(sampler):
    world = World.random(words=2, length=3)
    exact = world.exact_beliefs()
    torch.testing.assert_close(distribution(world, exact, sampler, 3, 0.7), world.probabilities, atol=1e-12, rtol=0)
    assert (
        distribution(world, exact, sampler, 2, 0.7) - world.probabilities
    ).abs().max() > 0.01  # two tokens in one step


@pytest.mark.parametrize("sampler", ["confidence", "threshold"])
def test_an_order_that_depends_on_the_drawn_token_does_not_sample_the_language(sampler):
    world = World.random(words=2, length=3)
    assert (distribution(world, world.exact_beliefs(), sampler, 3, 0.7) - world.probabilities).abs().max() > 0.05
