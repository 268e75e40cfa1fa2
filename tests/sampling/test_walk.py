"""Laws of the walk that draws positions first: it is the plain walk's law, by enumeration of every walk there is.

Every place of every step happens or not, and every token is one of four equally likely points of beliefs that are
quarters; so all walks of a small world fit in one batch, each with its probability.
"""

import itertools

import pytest
import torch
from worlds import Table, Told, World, chi_square, quarters, seeded

from adlm.config.schema import Sampling
from adlm.diffusion.masking import transition
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.draws import RowDraws, draw
from adlm.sampling.plain import plain_transition, plain_walk
from adlm.sampling.plan import STEPS_AT_ONCE, happenings
from adlm.sampling.steps import Steps, steps_of
from adlm.sampling.walk import walk

POINTS = [0.125, 0.375, 0.625, 0.875]
WALKS = [
    ("ancestral", {}, 3, 3),
    ("ancestral", {"t_end": 0.3}, 3, 2),
    ("ancestral", {"t_end": 0.3, "final": "draw"}, 2, 3),
    ("remdm-cap", {"eta": 0.3}, 2, 4),
    ("remdm-rescale", {"eta": 0.7, "t_end": 0.1}, 2, 4),
    ("remdm-rescale", {"eta": 0.9}, 3, 2),
    ("remdm-loop", {"eta": 0.3, "alpha_on": 0.6, "t_on": 0.7, "t_off": 0.3}, 2, 4),
    ("forward-backward", {}, 2, 3),
    ("dfm", {}, 2, 2),
    ("analytic", {"t_end": 0.4, "final": "draw"}, 2, 3),
]


def chain_law(world: World, beliefs, steps: Steps, final: str):
    """The distribution of final texts of the plain chain, as a product of matrices."""
    state = (world.states == world.mask_id).all(dim=1).double()
    for reveal, remask in zip(steps.reveal, steps.remask, strict=True):
        state = state @ world.between(transition(world.states, beliefs, reveal, remask, world.mask_id))
    last = beliefs
    if final == "argmax":
        last = torch.nn.functional.one_hot(beliefs.argmax(dim=-1), world.num_symbols).double()
    return state @ world.last_word(last)


def draw_walk(world, beliefs, sampling, canvas, seed=0):
    """All Frames of a walk with a table for a network."""
    steps, draws = steps_of(LogLinear(), sampling), RowDraws(seed, range(len(canvas)))
    table = beliefs if isinstance(beliefs, Table) else Table(world, beliefs)
    return list(walk(table, canvas, world.mask_id, steps, sampling, draws))


def every_walk(world: World, steps: Steps):
    """Numbers for places, numbers for tokens and the probability of every walk that can be."""
    num, length = len(steps.reveal), world.length
    places, tokens, weights = [], [], []
    for pattern in itertools.product((True, False), repeat=num * length):
        happens = [pattern[step * length : (step + 1) * length] for step in range(num)]
        masked, weight, reveals = [True] * length, 1.0, 0
        for step, events in enumerate(happens):
            for place, event in enumerate(events):
                chance = float((steps.reveal if masked[place] else steps.remask)[step])
                weight *= chance if event else 1 - chance
                reveals += event and masked[place]
                masked[place] ^= event
        if weight <= 0:
            continue
        reveals += sum(masked)
        for points in itertools.product(POINTS, repeat=reveals):
            places.append([0.0 if event else 1 - 2**-53 for event in pattern])
            tokens.append(list(points))
            weights.append(weight * 4.0**-reveals)
    return places, tokens, torch.tensor(weights, dtype=torch.float64)


def text_law(world: World, texts, weights):
    place_values = world.mask_id ** torch.arange(world.length - 1, -1, -1)
    return torch.zeros(len(world.texts), dtype=torch.float64).index_add(0, (texts * place_values).sum(dim=1), weights)


@pytest.mark.parametrize(("sampler", "knobs", "length", "num"), WALKS)
def test_positions_first_draws_from_the_same_law_as_the_full_posterior(sampler, knobs, length, num):
    world = World.random(words=2, length=length)
    beliefs, sampling = quarters(world), Sampling(sampler, steps=num, **knobs)
    steps = steps_of(LogLinear(), sampling)
    places, tokens, weights = every_walk(world, steps)
    assert weights.sum() == pytest.approx(1.0)
    canvas = torch.full((len(weights), length), world.mask_id)
    *_, last = walk(Table(world, beliefs), canvas, world.mask_id, steps, sampling, Told(places, tokens))
    ours = text_law(world, last.ids, weights)
    assert (ours - chain_law(world, beliefs, steps, sampling.final)).abs().sum() / 2 < 1e-12  # total variation


def test_positions_first_is_exact_for_any_chances_whatever():
    world, sampling = World.random(words=2, length=2), Sampling()
    beliefs, chance = quarters(world), torch.rand(2, 4, generator=seeded(), dtype=torch.float64)
    t = torch.linspace(1, 0, 5, dtype=torch.float64)
    steps = Steps(t, 1 - t[:-1], 1 - t[1:], chance[0], chance[1])
    places, tokens, weights = every_walk(world, steps)
    canvas = torch.full((len(weights), 2), world.mask_id)
    *_, last = walk(Table(world, beliefs), canvas, world.mask_id, steps, sampling, Told(places, tokens))
    ours = text_law(world, last.ids, weights)
    assert (ours - chain_law(world, beliefs, steps, "argmax")).abs().sum() / 2 < 1e-12


@pytest.mark.parametrize(("sampler", "knobs", "length", "num"), WALKS)
def test_the_plain_walk_has_the_law_of_its_chain(sampler, knobs, length, num):
    world = World.random(words=2, length=length)
    beliefs, sampling = quarters(world, seed=3), Sampling(sampler, steps=num, **knobs)
    steps, told = steps_of(LogLinear(), sampling), lookup(world, beliefs)
    one_step = plain_transition(told, world.mask_id, steps, sampling)
    canvas, draws = torch.full((4000, length), world.mask_id), RowDraws(0, range(4000))
    *_, last = plain_walk(one_step, told, canvas, world.mask_id, steps, sampling, draws)
    counts = text_law(world, last.ids, torch.ones(4000, dtype=torch.float64))
    expected = 4000 * chain_law(world, beliefs, steps, sampling.final)
    assert chi_square(counts, expected) < 26  # 7 degrees of freedom at most: once in two thousand seeds


def lookup(world, beliefs):
    """Log beliefs everywhere, as the plain walk asks."""
    place_values = world.num_symbols ** torch.arange(world.length - 1, -1, -1)
    return lambda z, alpha: beliefs.log()[(z * place_values).sum(dim=1)]


@pytest.mark.parametrize(
    "sampler", ["ancestral", "remdm-cap", "remdm-rescale", "remdm-loop", "forward-backward", "dfm"]
)
def test_longer_texts_have_the_law_of_their_chain(sampler):
    world = World.random(words=2, length=4)
    beliefs, sampling = world.random_beliefs(), Sampling(sampler, steps=6, t_end=0.05, top_p=0.8)
    steps = steps_of(LogLinear(), sampling)
    open_ = world.states == world.mask_id
    keep = beliefs.max(dim=-1, keepdim=True).values >= 0.8  # the crossing token is kept: both words, or one alone
    sharp = torch.where(open_[..., None] & keep, (beliefs == beliefs.max(-1, keepdim=True).values).double(), beliefs)
    *_, last = draw_walk(world, beliefs, sampling, torch.full((20_000, 4), world.mask_id), seed=1)
    counts = text_law(world, last.ids, torch.ones(20_000, dtype=torch.float64))
    law = chain_law(world, sharp, steps, sampling.final)
    assert chi_square(counts, 20_000 * law) < 37.7  # 15 degrees of freedom: once in a thousand seeds


def test_with_exact_beliefs_and_many_steps_ancestral_sampling_returns_the_language():
    world = World.random(words=3, length=3)
    canvas = torch.full((15_000, 3), world.mask_id)
    *_, last = draw_walk(world, world.exact_beliefs(), Sampling(steps=300), canvas)
    counts = text_law(world, last.ids, torch.ones(15_000, dtype=torch.float64))
    assert chi_square(counts, 15_000 * world.probabilities) < 54.1  # 26 degrees of freedom: once in a thousand seeds


def test_few_steps_do_not_return_the_language():
    """So the law above is one that can fail: in one step all words are drawn as if they were alone."""
    world = World.random(words=3, length=3)
    canvas = torch.full((15_000, 3), world.mask_id)
    *_, last = draw_walk(world, world.exact_beliefs(), Sampling(steps=1), canvas)
    counts = text_law(world, last.ids, torch.ones(15_000, dtype=torch.float64))
    assert chi_square(counts, 15_000 * world.probabilities) > 200


@pytest.mark.parametrize("sampler", ["ancestral", "remdm-cap", "remdm-loop", "dfm"])
def test_skipping_steps_without_events_changes_nothing(sampler):
    """The same happenings with the network read at every step, one row at a time."""
    world = World.random(words=2, length=4)
    table, sampling = Table(world, world.random_beliefs()), Sampling(sampler, steps=90, t_end=0.02)
    steps, rows = steps_of(LogLinear(), sampling), 20
    canvas = torch.full((rows, 4), world.mask_id)
    canvas[::3, 1] = 0
    frames = list(walk(table, canvas, world.mask_id, steps, sampling, RowDraws(0, range(rows))))
    calls = table.calls
    for row in range(rows):
        draws = RowDraws(0, [row])
        z = canvas[row : row + 1].clone()
        open_ = (z == world.mask_id)[0]
        for step in range(len(steps.reveal) + 1):
            if step % STEPS_AT_ONCE == 0:
                numbers = torch.from_numpy(draws.for_places(0, STEPS_AT_ONCE, int(open_.sum())))
            log_beliefs = table(z, None, None).log_beliefs(torch.arange(4))
            masked = z[0] == world.mask_id
            if step == len(steps.reveal):
                z[0, masked] = log_beliefs[masked].argmax(dim=-1)
                break
            points = torch.ones(4, dtype=torch.float64)
            points[open_] = numbers[step % STEPS_AT_ONCE]
            reveals, remasks = masked & (points < steps.reveal[step]), open_ & ~masked & (points < steps.remask[step])
            z[0, reveals] = draw(log_beliefs[reveals].exp(), torch.from_numpy(draws.for_tokens(0, int(reveals.sum()))))
            z[0, remasks] = world.mask_id
        assert torch.equal(z[0], frames[-1].ids[row])
    assert calls < len(steps.reveal)


@pytest.mark.parametrize("sampler", ["ancestral", "remdm-rescale"])
def test_given_tokens_never_change_and_frames_tell_what_did(sampler):
    world = World.random(words=2, length=4)
    sampling = Sampling(sampler, steps=30, eta=0.9 if sampler != "ancestral" else None)
    canvas = torch.full((200, 4), world.mask_id)
    canvas[:, 2] = 1
    canvas[::2, 0] = 0
    frames = draw_walk(world, world.random_beliefs(), sampling, canvas)
    given = canvas != world.mask_id
    assert torch.equal(frames[0].ids, canvas)
    assert (frames[0].t == 1).all()
    for before, after in itertools.pairwise(frames):
        assert torch.equal(after.ids[given], canvas[given])
        assert (after.chance[given] == 1).all()
        assert (after.t <= before.t).all()
        was, now = before.ids == world.mask_id, after.ids == world.mask_id
        assert torch.equal(after.chance == 0, now)
        assert (after.revealed[was & ~now]).all()
        assert (after.remasked[~was & now]).all()
        kept = ~(after.revealed | after.remasked)
        assert torch.equal(before.ids[kept], after.ids[kept])
    assert any(frame.remasked.any() for frame in frames) == (sampler != "ancestral")
    assert (frames[-1].ids != world.mask_id).all()


def test_rows_draw_the_same_alone_and_in_any_batch():
    world = World.random(words=2, length=4)
    table, sampling = Table(world, world.random_beliefs()), Sampling("remdm-cap", steps=12, eta=0.2)
    steps = steps_of(LogLinear(), sampling)
    canvas = torch.full((9, 4), world.mask_id)
    canvas[1, :3], canvas[5, 0] = 0, 1
    *_, together = walk(table, canvas, world.mask_id, steps, sampling, RowDraws(3, range(9)))
    for row in range(9):
        *_, alone = walk(table, canvas[row : row + 1], world.mask_id, steps, sampling, RowDraws(3, [row]))
        assert torch.equal(alone.ids[0], together.ids[row])


def test_a_row_that_is_done_is_no_longer_read():
    world = World.random(words=2, length=4)
    read = []

    class Counting(Table):
        def __call__(self, z, alpha, pad):
            read.append(len(z))
            assert len(alpha) == len(z)
            return super().__call__(z, alpha, pad)

    canvas = torch.full((8, 4), 0)
    canvas[:, 0] = world.mask_id
    canvas[0] = world.mask_id
    sampling = Sampling(steps=50)
    draw_walk(world, Counting(world, world.random_beliefs()), sampling, canvas)
    assert read[0] == 8
    assert set(read[1:]) == {1}


def test_places_happen_with_their_chances():
    """The chain of one place, over many rows, beside its matrix product."""
    steps = steps_of(LogLinear(), Sampling("remdm-rescale", eta=0.5, steps=5))
    rows = 20_000
    reveals, remasks, _ = happenings(steps, torch.ones(rows, 1, dtype=torch.bool).numpy(), RowDraws(0, range(rows)))
    masked = 1.0
    for step in range(5):
        for chance, happened in (
            (masked * steps.reveal[step], (reveals.step == step).sum()),
            ((1 - masked) * steps.remask[step], (remasks.step == step).sum()),
        ):
            deviation = (rows * chance * (1 - chance)).sqrt() if isinstance(chance, torch.Tensor) else 0
            assert abs(int(happened) - rows * float(chance)) <= 4 * float(deviation) + 1e-9
        masked = float(masked * (1 - steps.reveal[step]) + (1 - masked) * steps.remask[step])


def test_the_network_is_told_the_noise_at_which_each_row_stands():
    world = World.random(words=2, length=3)
    told = []

    class Listening(Table):
        def __call__(self, z, alpha, pad):
            told.append(alpha.clone())
            return super().__call__(z, alpha, pad)

    sampling = Sampling(steps=7)
    steps = steps_of(LogLinear(), sampling)
    canvas = torch.full((1, 3), world.mask_id)
    frames = draw_walk(world, Listening(world, world.random_beliefs()), sampling, canvas)
    for alpha, frame in zip(told, frames[1:], strict=True):
        step = int((steps.t - frame.t).abs().argmin()) - 1
        assert alpha[0] == steps.alpha_t[step]
