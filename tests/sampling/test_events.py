"""Laws of the walk that draws positions first: it is the plain walk's law, by enumeration of every walk there is.

Every place of every step happens or not, and every token is one of four equally likely points of beliefs that are
quarters; so all walks of a small world fit in one batch, each with its probability.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import mostly_slow
from worlds import Table, Told, World, chi_square, quarters, real, seeded

from adlm.config.schema import Sampling
from adlm.diffusion.masking import transition
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.events import draw_events, sample_positions_first
from adlm.sampling.reference import reference_transition, sample_reference
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.steps import Steps, steps_of

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
    steps, draws = steps_of(LogLinear(), sampling), RowRng(seed, range(len(canvas)))
    table = beliefs if isinstance(beliefs, Table) else Table(world, beliefs)
    return list(sample_positions_first(table, canvas, world.mask_id, steps, sampling, draws))


def every_walk(world: World, steps: Steps):
    """Numbers for places, numbers for tokens and the probability of every walk that can be.

    A walk comes twice, with the least and with the largest numbers that give it, up to a billionth: half of it each.
    """
    num, length = len(steps.reveal), world.length
    places, tokens, weights = [], [], []
    for pattern in itertools.product((True, False), repeat=num * length):
        happens = [[step for step in range(num) if pattern[step * length + place]] for place in range(length)]
        waits = [intervals(each, steps) for each in happens]
        weight = np.prod([high - low for each in waits for low, high in each])
        if weight < 1e-15:  # a chance of the schedule that is 0, or 1, but for rounding
            continue
        rounds = [each for each in itertools.chain(*itertools.zip_longest(*waits)) if each]
        reveals = sum(len(each) // 2 + 1 for each in happens)  # every other event, and what is masked at the end
        for points in itertools.product(POINTS, repeat=reveals):
            for near, far in ((1, 1e-9), (1e-9, 1)):
                places.append([(low * near + high * far) / (near + far) for low, high in rounds])
                tokens.append(list(points))
                weights.append(weight * 4.0**-reveals / 2)
    return places, tokens, torch.tensor(weights, dtype=torch.float64)


def intervals(happens: list[int], steps: Steps):
    """Of the numbers that let a place change at these steps and at no others: one for every wait, to the last of all.

    A number below the chance that something happens by a step, and not by the step before it, names that step.
    """
    found, start = [], 0
    for number, step in enumerate([*happens, None]):
        chance = (steps.remask if number % 2 else steps.reveal).numpy()
        quiet = np.cumprod(np.concatenate([[1.0], 1 - chance[start:]]))
        after = len(chance) - start if step is None else step - start
        found.append((1 - quiet[after], 1.0 if step is None else 1 - quiet[after + 1]))
        start = len(chance) if step is None else step + 1
    return found


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
    *_, last = sample_positions_first(
        Table(world, beliefs), canvas, world.mask_id, steps, sampling, Told(places, tokens)
    )
    ours = text_law(world, last.ids, weights)
    assert (ours - chain_law(world, beliefs, steps, sampling.final)).abs().sum() / 2 < 1e-12  # total variation


def test_positions_first_is_exact_for_any_chances_whatever():
    world, sampling = World.random(words=2, length=2), Sampling()
    beliefs, chance = quarters(world), torch.rand(2, 4, generator=seeded(), dtype=torch.float64)
    t = torch.linspace(1, 0, 5, dtype=torch.float64)
    steps = Steps(t, 1 - t[:-1], 1 - t[1:], chance[0], chance[1])
    places, tokens, weights = every_walk(world, steps)
    canvas = torch.full((len(weights), 2), world.mask_id)
    *_, last = sample_positions_first(
        Table(world, beliefs), canvas, world.mask_id, steps, sampling, Told(places, tokens)
    )
    ours = text_law(world, last.ids, weights)
    assert (ours - chain_law(world, beliefs, steps, "argmax")).abs().sum() / 2 < 1e-12


@pytest.mark.parametrize(("sampler", "knobs", "length", "num"), WALKS)
def test_the_plain_walk_has_the_law_of_its_chain(sampler, knobs, length, num):
    world = World.random(words=2, length=length)
    beliefs, sampling = quarters(world, seed=3), Sampling(sampler, steps=num, **knobs)
    steps, told = steps_of(LogLinear(), sampling), lookup(world, beliefs)
    one_step = reference_transition(told, world.mask_id, steps, sampling)
    canvas, draws = torch.full((4000, length), world.mask_id), RowRng(0, range(4000))
    *_, last = sample_reference(one_step, told, canvas, world.mask_id, steps, sampling, draws)
    counts = text_law(world, last.ids, torch.ones(4000, dtype=torch.float64))
    expected = 4000 * chain_law(world, beliefs, steps, sampling.final)
    assert chi_square(counts, expected) < 26  # 7 degrees of freedom at most: once in two thousand seeds


def lookup(world, beliefs):
    """Log beliefs everywhere, as the plain walk asks."""
    place_values = world.num_symbols ** torch.arange(world.length - 1, -1, -1)
    return lambda z, alpha: beliefs.log()[(z * place_values).sum(dim=1)]


@pytest.mark.parametrize(
    "sampler",
    mostly_slow(["ancestral", "remdm-cap", "remdm-rescale", "remdm-loop", "forward-backward", "dfm"], "remdm-rescale"),
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


def distance(sampling: Sampling) -> float:
    """Total variation between a sampler's texts and a language of 00 and 11, half each, with exact beliefs."""
    world = World(2, 2, real([0.5, 0.0, 0.0, 0.5]))
    exact, itself = world.exact_beliefs(), torch.nn.functional.one_hot(world.states, world.num_symbols).double()
    beliefs = torch.where(exact.isnan(), itself, exact)  # 01 and 10 are no texts, but they stay what they are
    law = chain_law(world, beliefs, steps_of(LogLinear(), sampling), sampling.final)
    return float((law - world.probabilities).abs().sum() / 2)


@pytest.mark.parametrize(
    ("sampler", "eta", "falls_by"),
    [
        ("ancestral", None, 4.0),  # like 1 / T
        ("forward-backward", None, 4.0),
        ("dfm", None, 4.0),
        ("remdm-cap", 0.5, 2.0),  # like 1 / sqrt(T)
        ("remdm-rescale", 0.5, 2.0),
    ],
)
def test_samplers_that_are_exact_in_the_limit_come_nearer_with_every_step(sampler, eta, falls_by):
    few, many = (distance(Sampling(sampler, steps=steps, eta=eta)) for steps in (256, 1024))
    assert few / many == pytest.approx(falls_by, rel=0.05)


@pytest.mark.parametrize(("eta", "stays_at"), [(0.02, 0.0041), (0.1, 0.0213)])
def test_the_loop_with_a_fixed_eta_stays_away_from_the_language_however_many_steps_it_takes(eta, stays_at):
    """Every step of the loop masks and reveals the same share, so tokens that change together stay as frequent."""
    few, many = (distance(Sampling("remdm-loop", steps=steps, eta=eta)) for steps in (512, 2048))
    assert few / many < 1.05
    assert many == pytest.approx(stays_at, abs=1e-4)
    falling = [distance(Sampling("remdm-loop", steps=steps, eta=0.8 / steps)) for steps in (256, 1024)]
    assert falling[0] / falling[1] == pytest.approx(4.0, rel=0.05), "with eta like 1 / T it does not"


def test_the_distances_that_the_docs_print_are_these():
    docs = (Path(__file__).parent.parent.parent / "docs" / "sampling.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)`(?:, eta ([\d.]+)( / T)?)? \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|$", docs, re.M
    )
    assert len(rows) == 8
    for sampler, eta, falling, at_64, at_512 in rows:
        for steps, printed in ((64, at_64), (512, at_512)):
            strength = float(eta) / (steps if falling else 1) if eta else None
            assert distance(Sampling(sampler, steps=steps, eta=strength)) == pytest.approx(float(printed), abs=5e-6)


@pytest.mark.parametrize("sampler", ["ancestral", "remdm-cap", "remdm-loop", "dfm"])
def test_skipping_steps_without_events_changes_nothing(sampler):
    """The same happenings with the network read at every step, one row at a time."""
    world = World.random(words=2, length=4)
    table, sampling = Table(world, world.random_beliefs()), Sampling(sampler, steps=90, t_end=0.02)
    steps, rows = steps_of(LogLinear(), sampling), 20
    canvas = torch.full((rows, 4), world.mask_id)
    canvas[::3, 1] = 0
    frames = list(sample_positions_first(table, canvas, world.mask_id, steps, sampling, RowRng(0, range(rows))))
    calls = table.calls
    for row in range(rows):
        draws, z = RowRng(0, [row]), canvas[row : row + 1].clone()
        reveals, hides, _ = draw_events(steps, (z == world.mask_id).numpy(), draws)
        for step in range(len(steps.reveal) + 1):
            log_beliefs = table(z, None, None).log_beliefs(torch.arange(4))
            shown, hidden = (torch.from_numpy(each.place[each.step == step]) for each in (reveals, hides))
            drawn = categorical(log_beliefs[shown].exp(), torch.from_numpy(draws.for_tokens(0, len(shown))))
            z[0, shown] = log_beliefs[shown].argmax(dim=-1) if step == len(steps.reveal) else drawn
            z[0, hidden] = world.mask_id
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
    *_, together = sample_positions_first(table, canvas, world.mask_id, steps, sampling, RowRng(3, range(9)))
    for row in range(9):
        *_, alone = sample_positions_first(
            table, canvas[row : row + 1], world.mask_id, steps, sampling, RowRng(3, [row])
        )
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
    reveals, remasks, _ = draw_events(steps, torch.ones(rows, 1, dtype=torch.bool).numpy(), RowRng(0, range(rows)))
    masked = 1.0
    for step in range(5):
        for chance, happened in (
            (masked * steps.reveal[step], (reveals.step == step).sum()),
            ((1 - masked) * steps.remask[step], (remasks.step == step).sum()),
        ):
            deviation = (rows * chance * (1 - chance)).sqrt() if isinstance(chance, torch.Tensor) else 0
            assert abs(int(happened) - rows * float(chance)) <= 4 * float(deviation) + 1e-9
        masked = float(masked * (1 - steps.reveal[step]) + (1 - masked) * steps.remask[step])


def test_a_certain_step_happens_whatever_the_number_and_an_impossible_one_never():
    chance = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.float64)
    t = torch.linspace(1, 0, 6, dtype=torch.float64)
    steps = Steps(t, 1 - t[:-1], 1 - t[1:], *chance)
    numbers = [[low] * 4 for low in (0.0, 0.5, 1 - 2**-53)]
    reveals, remasks, num_calls = draw_events(steps, np.ones((3, 1), dtype=bool), Told(numbers, numbers))
    assert reveals.step.tolist() == [1, 3] * 3
    assert remasks.step.tolist() == [2] * 3
    assert num_calls.tolist() == [2] * 3


def test_steps_in_which_nothing_happens_cost_nothing():
    drawn = []

    class Counting(RowRng):
        def for_places(self, row, num):
            drawn.append(num)
            return super().for_places(row, num)

    steps = steps_of(LogLinear(), Sampling(steps=100_000))
    reveals, _, _ = draw_events(steps, np.ones((2, 8), dtype=bool), Counting(0, range(2)))
    assert len(reveals.step) == 16
    assert sum(drawn) == 2 * 16  # until it is revealed, and that it is not masked again


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
