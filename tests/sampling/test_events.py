"""Positions-first sampling has the distribution of reference sampling, by enumeration of all sampling runs.

Every position changes or not at every step, and since all beliefs are quarters, four equally likely uniform numbers
cover every token. So all sampling runs of a small world fit in one batch, each with its probability.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import mostly_slow
from worlds import FixedRng, Table, World, chi_square, quarters, real, seeded

from adlm.config.schema import Sampling
from adlm.diffusion.masking import transition
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.events import draw_events, sample_positions_first
from adlm.sampling.frame import NoisyRows, SamplingRun
from adlm.sampling.reference import reference_transition, sample_reference
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.samplers import steps_of
from adlm.sampling.steps import Steps

UNIFORMS = [0.125, 0.375, 0.625, 0.875]
RUNS = [
    ("ancestral", {}, 3, 3),
    ("ancestral", {"t_end": 0.3}, 3, 2),
    ("ancestral", {"t_end": 0.3, "final": "draw"}, 2, 3),
    ("remdm-cap", {"eta": 0.3}, 2, 4),
    ("remdm-rescale", {"eta": 0.7, "t_end": 0.1}, 2, 3),
    ("remdm-rescale", {"eta": 0.9}, 3, 2),
    ("remdm-loop", {"eta": 0.3, "alpha_on": 0.6, "t_on": 0.7, "t_off": 0.3}, 2, 4),
    ("forward-backward", {}, 2, 3),
    ("dfm", {}, 2, 2),
    ("analytic", {"t_end": 0.4, "final": "draw"}, 2, 3),
]


def chain_distribution(world: World, beliefs, steps: Steps, final: str):
    """The distribution of final texts of the Markov chain, as a product of matrices."""
    state = (world.states == world.mask_id).all(dim=1).double()
    for reveal, remask in zip(steps.reveal, steps.remask, strict=True):
        state = state @ world.between(transition(world.states, beliefs, reveal, remask, world.mask_id))
    last = beliefs
    if final == "argmax":
        last = torch.nn.functional.one_hot(beliefs.argmax(dim=-1), world.num_symbols).double()
    return state @ world.final_reveal(last)


def sample_frames(world, beliefs, sampling, canvas, seed=0):
    """All Frames of a sampling run with a table for a network."""
    steps, rng = steps_of(LogLinear(), sampling), RowRng(seed, range(len(canvas)))
    table = beliefs if isinstance(beliefs, Table) else Table(world, beliefs)
    return list(sample_positions_first(SamplingRun(table, canvas, world.mask_id, steps, sampling, rng)))


def enumerate_runs(world: World, steps: Steps):
    """Position uniforms, token uniforms and the probability of every possible sampling run.

    Each run comes twice, at half its probability: with the smallest and the largest uniforms that produce it (to 1e-9).
    """
    num, length = len(steps.reveal), world.length
    positions, tokens, weights = [], [], []
    for pattern in itertools.product((True, False), repeat=num * length):
        change_steps = [
            [step for step in range(num) if pattern[step * length + position]] for position in range(length)
        ]
        waits = [intervals(each, steps) for each in change_steps]
        weight = np.prod([high - low for each in waits for low, high in each])
        if weight < 1e-15:  # a probability of 0 or 1 up to rounding
            continue
        rounds = [each for each in itertools.chain(*itertools.zip_longest(*waits)) if each]
        reveals = sum(len(each) // 2 + 1 for each in change_steps)  # every other change, and the final reveal
        for uniforms in itertools.product(UNIFORMS, repeat=reveals):
            for near, far in ((1, 1e-9), (1e-9, 1)):
                positions.append([(low * near + high * far) / (near + far) for low, high in rounds])
                tokens.append(list(uniforms))
                weights.append(weight * 4.0**-reveals / 2)
    return positions, tokens, torch.tensor(weights, dtype=torch.float64)


def intervals(change_steps: list[int], steps: Steps):
    """For each waiting time, the interval of uniforms with which a position changes at exactly these steps.

    A uniform u selects the first step k with u < P(a change by step k). The last interval is that of no more changes.
    """
    found, start = [], 0
    for number, step in enumerate([*change_steps, None]):
        probability = (steps.remask if number % 2 else steps.reveal).numpy()
        unchanged = np.cumprod(np.concatenate([[1.0], 1 - probability[start:]]))
        after = len(probability) - start if step is None else step - start
        found.append((1 - unchanged[after], 1.0 if step is None else 1 - unchanged[after + 1]))
        start = len(probability) if step is None else step + 1
    return found


def text_distribution(world: World, texts, weights):
    position_values = world.mask_id ** torch.arange(world.length - 1, -1, -1)
    return torch.zeros(len(world.texts), dtype=torch.float64).index_add(
        0, (texts * position_values).sum(dim=1), weights
    )


@pytest.mark.parametrize(
    ("sampler", "options", "length", "num"),
    [*RUNS, pytest.param("remdm-rescale", {"eta": 0.7, "t_end": 0.1}, 2, 4, marks=pytest.mark.slow)],
)
def test_positions_first_samples_the_same_distribution_as_the_full_posterior(sampler, options, length, num):
    world = World.random(words=2, length=length)
    beliefs, sampling = quarters(world), Sampling(sampler, steps=num, **options)
    steps = steps_of(LogLinear(), sampling)
    positions, tokens, weights = enumerate_runs(world, steps)
    assert weights.sum() == pytest.approx(1.0)
    canvas = torch.full((len(weights), length), world.mask_id)
    *_, last = sample_positions_first(
        SamplingRun(Table(world, beliefs), canvas, world.mask_id, steps, sampling, FixedRng(positions, tokens))
    )
    ours = text_distribution(world, last.ids, weights)
    assert (ours - chain_distribution(world, beliefs, steps, sampling.final)).abs().sum() / 2 < 1e-12  # total variation


@pytest.mark.parametrize("num", mostly_slow([3, 4], 3))
def test_positions_first_is_exact_for_arbitrary_step_probabilities(num):
    world, sampling = World.random(words=2, length=2), Sampling()
    beliefs, probabilities = quarters(world), torch.rand(2, num, generator=seeded(), dtype=torch.float64)
    t = torch.linspace(1, 0, num + 1, dtype=torch.float64)
    steps = Steps(t, 1 - t[:-1], 1 - t[1:], *probabilities)
    positions, tokens, weights = enumerate_runs(world, steps)
    canvas = torch.full((len(weights), 2), world.mask_id)
    *_, last = sample_positions_first(
        SamplingRun(Table(world, beliefs), canvas, world.mask_id, steps, sampling, FixedRng(positions, tokens))
    )
    ours = text_distribution(world, last.ids, weights)
    assert (ours - chain_distribution(world, beliefs, steps, "argmax")).abs().sum() / 2 < 1e-12


@pytest.mark.parametrize(("sampler", "options", "length", "num"), RUNS)
def test_reference_sampling_has_the_distribution_of_its_chain(sampler, options, length, num):
    world = World.random(words=2, length=length)
    beliefs, sampling = quarters(world, seed=3), Sampling(sampler, steps=num, **options)
    steps, log_beliefs = steps_of(LogLinear(), sampling), lookup(world, beliefs)
    one_step = reference_transition(log_beliefs, world.mask_id, steps, sampling)
    canvas, rng = torch.full((2000, length), world.mask_id), RowRng(0, range(2000))
    *_, last = sample_reference(
        SamplingRun(Table(world, beliefs), canvas, world.mask_id, steps, sampling, rng), one_step, log_beliefs
    )
    counts = text_distribution(world, last.ids, torch.ones(2000, dtype=torch.float64))
    expected = 2000 * chain_distribution(world, beliefs, steps, sampling.final)
    assert chi_square(counts, expected) < 26  # 7 degrees of freedom at most: once in two thousand seeds


def lookup(world, beliefs):
    """Log beliefs (B, L, V) at every position, as `sample_reference` expects them."""
    position_values = world.num_symbols ** torch.arange(world.length - 1, -1, -1)
    return lambda z, alpha: beliefs.log()[(z * position_values).sum(dim=1)]


@pytest.mark.parametrize(
    "sampler",
    mostly_slow(["ancestral", "remdm-cap", "remdm-rescale", "remdm-loop", "forward-backward", "dfm"], "remdm-rescale"),
)
def test_longer_texts_have_the_distribution_of_their_chain(sampler):
    world = World.random(words=2, length=4)
    beliefs, sampling = world.random_beliefs(), Sampling(sampler, steps=6, t_end=0.05, top_p=0.8)
    steps = steps_of(LogLinear(), sampling)
    to_fill = world.states == world.mask_id
    keep = beliefs.max(dim=-1, keepdim=True).values >= 0.8  # the crossing token is kept: both words, or one alone
    sharp = torch.where(to_fill[..., None] & keep, (beliefs == beliefs.max(-1, keepdim=True).values).double(), beliefs)
    *_, last = sample_frames(world, beliefs, sampling, torch.full((10_000, 4), world.mask_id), seed=1)
    counts = text_distribution(world, last.ids, torch.ones(10_000, dtype=torch.float64))
    expected = chain_distribution(world, sharp, steps, sampling.final)
    assert chi_square(counts, 10_000 * expected) < 37.7  # 15 degrees of freedom: once in a thousand seeds


def test_with_exact_beliefs_and_many_steps_ancestral_sampling_samples_the_language():
    world = World.random(words=3, length=3)
    canvas = torch.full((6_000, 3), world.mask_id)
    *_, last = sample_frames(world, world.exact_beliefs(), Sampling(steps=300), canvas)
    counts = text_distribution(world, last.ids, torch.ones(6_000, dtype=torch.float64))
    assert chi_square(counts, 6_000 * world.probabilities) < 54.1  # 26 degrees of freedom: once in a thousand seeds


def test_few_steps_do_not_sample_the_language():
    """So the test above can fail: in one step all words are drawn independently."""
    world = World.random(words=3, length=3)
    canvas = torch.full((6_000, 3), world.mask_id)
    *_, last = sample_frames(world, world.exact_beliefs(), Sampling(steps=1), canvas)
    counts = text_distribution(world, last.ids, torch.ones(6_000, dtype=torch.float64))
    assert chi_square(counts, 6_000 * world.probabilities) > 80


def distance(sampling: Sampling) -> float:
    """Total variation between a sampler's texts and a language of 00 and 11, half each, with exact beliefs."""
    world = World(2, 2, real([0.5, 0.0, 0.0, 0.5]))
    exact, itself = world.exact_beliefs(), torch.nn.functional.one_hot(world.states, world.num_symbols).double()
    beliefs = torch.where(exact.isnan(), itself, exact)  # 01 and 10 are not texts, and they stay unchanged
    ours = chain_distribution(world, beliefs, steps_of(LogLinear(), sampling), sampling.final)
    return float((ours - world.probabilities).abs().sum() / 2)


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
def test_samplers_that_are_exact_in_the_limit_converge_as_steps_grow(sampler, eta, falls_by):
    few, many = (distance(Sampling(sampler, steps=steps, eta=eta)) for steps in (256, 1024))
    assert few / many == pytest.approx(falls_by, rel=0.05)


@pytest.mark.parametrize(("eta", "stays_at"), [(0.02, 0.0041), (0.1, 0.0213)])
def test_the_loop_with_a_fixed_eta_does_not_converge_to_the_language(eta, stays_at):
    """Every step of the loop remasks and reveals the same share, so simultaneous changes stay as frequent."""
    few, many = (distance(Sampling("remdm-loop", steps=steps, eta=eta)) for steps in (512, 2048))
    assert few / many < 1.05
    assert many == pytest.approx(stays_at, abs=1e-4)
    falling = [distance(Sampling("remdm-loop", steps=steps, eta=0.8 / steps)) for steps in (256, 1024)]
    assert falling[0] / falling[1] == pytest.approx(4.0, rel=0.05), "with eta proportional to 1 / T it converges"


def test_the_distances_in_the_docs_are_reproduced():
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
    """The same changes with a network call at every step, one row at a time."""
    world = World.random(words=2, length=4)
    table, sampling = Table(world, world.random_beliefs()), Sampling(sampler, steps=90, t_end=0.02)
    steps, rows = steps_of(LogLinear(), sampling), 8
    canvas = torch.full((rows, 4), world.mask_id)
    canvas[::3, 1] = 0
    frames = list(
        sample_positions_first(SamplingRun(table, canvas, world.mask_id, steps, sampling, RowRng(0, range(rows))))
    )
    calls = table.calls
    for row in range(rows):
        rng, z = RowRng(0, [row]), canvas[row : row + 1].clone()
        reveals, remasks, _ = draw_events(steps, (z == world.mask_id).numpy(), rng)
        for step in range(len(steps.reveal) + 1):
            log_beliefs = table(NoisyRows(z)).log_beliefs(torch.arange(4))
            revealed, remasked = (torch.from_numpy(each.position[each.step == step]) for each in (reveals, remasks))
            drawn = categorical(log_beliefs[revealed].exp(), torch.from_numpy(rng.for_tokens(0, len(revealed))))
            z[0, revealed] = log_beliefs[revealed].argmax(dim=-1) if step == len(steps.reveal) else drawn
            z[0, remasked] = world.mask_id
        assert torch.equal(z[0], frames[-1].ids[row])
    assert calls < len(steps.reveal)


@pytest.mark.parametrize("sampler", ["ancestral", "remdm-rescale"])
def test_given_tokens_never_change_and_frames_report_all_changes(sampler):
    world = World.random(words=2, length=4)
    sampling = Sampling(sampler, steps=30, eta=0.9 if sampler != "ancestral" else None)
    canvas = torch.full((200, 4), world.mask_id)
    canvas[:, 2] = 1
    canvas[::2, 0] = 0
    frames = sample_frames(world, world.random_beliefs(), sampling, canvas)
    given = canvas != world.mask_id
    assert torch.equal(frames[0].ids, canvas)
    assert (frames[0].t == 1).all()
    for before, after in itertools.pairwise(frames):
        assert torch.equal(after.ids[given], canvas[given])
        assert (after.chance[given] == 1).all()
        assert (after.t <= before.t).all()
        was_masked, is_masked = before.ids == world.mask_id, after.ids == world.mask_id
        assert torch.equal(after.chance == 0, is_masked)
        assert (after.revealed[was_masked & ~is_masked]).all()
        assert (after.remasked[~was_masked & is_masked]).all()
        unchanged = ~(after.revealed | after.remasked)
        assert torch.equal(before.ids[unchanged], after.ids[unchanged])
    assert any(frame.remasked.any() for frame in frames) == (sampler != "ancestral")
    assert (frames[-1].ids != world.mask_id).all()


def test_rows_draw_the_same_alone_and_in_any_batch():
    world = World.random(words=2, length=4)
    table, sampling = Table(world, world.random_beliefs()), Sampling("remdm-cap", steps=12, eta=0.2)
    steps = steps_of(LogLinear(), sampling)
    canvas = torch.full((9, 4), world.mask_id)
    canvas[1, :3], canvas[5, 0] = 0, 1
    *_, together = sample_positions_first(
        SamplingRun(table, canvas, world.mask_id, steps, sampling, RowRng(3, range(9)))
    )
    for row in range(9):
        *_, alone = sample_positions_first(
            SamplingRun(table, canvas[row : row + 1], world.mask_id, steps, sampling, RowRng(3, [row]))
        )
        assert torch.equal(alone.ids[0], together.ids[row])


def test_finished_rows_are_no_longer_read():
    world = World.random(words=2, length=4)
    read = []

    class Counting(Table):
        def __call__(self, noisy):
            read.append(len(noisy.z))
            assert len(noisy.alpha) == len(noisy.z)
            return super().__call__(noisy)

    canvas = torch.full((8, 4), 0)
    canvas[:, 0] = world.mask_id
    canvas[0] = world.mask_id
    sampling = Sampling(steps=50)
    sample_frames(world, Counting(world, world.random_beliefs()), sampling, canvas)
    assert read[0] == 8
    assert set(read[1:]) == {1}


def test_positions_change_with_their_probabilities():
    """The chain of one position over many rows, against its marginal."""
    steps = steps_of(LogLinear(), Sampling("remdm-rescale", eta=0.5, steps=5))
    rows = 8_000
    reveals, remasks, _ = draw_events(steps, torch.ones(rows, 1, dtype=torch.bool).numpy(), RowRng(0, range(rows)))
    masked = 1.0
    for step in range(5):
        for probability, num_changes in (
            (masked * steps.reveal[step], (reveals.step == step).sum()),
            ((1 - masked) * steps.remask[step], (remasks.step == step).sum()),
        ):
            variance = rows * probability * (1 - probability)
            deviation = variance.sqrt() if isinstance(probability, torch.Tensor) else 0
            assert abs(int(num_changes) - rows * float(probability)) <= 4 * float(deviation) + 1e-9
        masked = float(masked * (1 - steps.reveal[step]) + (1 - masked) * steps.remask[step])


def test_a_step_of_probability_one_always_changes_and_one_of_probability_zero_never():
    probabilities = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.float64)
    t = torch.linspace(1, 0, 6, dtype=torch.float64)
    steps = Steps(t, 1 - t[:-1], 1 - t[1:], *probabilities)
    uniforms = [[u] * 4 for u in (0.0, 0.5, 1 - 2**-53)]
    reveals, remasks, num_calls = draw_events(steps, np.ones((3, 1), dtype=bool), FixedRng(uniforms, uniforms))
    assert reveals.step.tolist() == [1, 3] * 3
    assert remasks.step.tolist() == [2] * 3
    assert num_calls.tolist() == [2] * 3


def test_steps_without_changes_draw_no_numbers():
    drawn = []

    class Counting(RowRng):
        def for_positions(self, row, num):
            drawn.append(num)
            return super().for_positions(row, num)

    steps = steps_of(LogLinear(), Sampling(steps=100_000))
    reveals, _, _ = draw_events(steps, np.ones((2, 8), dtype=bool), Counting(0, range(2)))
    assert len(reveals.step) == 16
    assert sum(drawn) == 2 * 16  # one until the reveal, and one for no remasking after it


def test_the_network_is_conditioned_on_the_noise_level_of_each_row():
    world = World.random(words=2, length=3)
    alphas = []

    class RecordingTable(Table):
        def __call__(self, noisy):
            alphas.append(noisy.alpha.clone())
            return super().__call__(noisy)

    sampling = Sampling(steps=7)
    steps = steps_of(LogLinear(), sampling)
    canvas = torch.full((1, 3), world.mask_id)
    frames = sample_frames(world, RecordingTable(world, world.random_beliefs()), sampling, canvas)
    for alpha, frame in zip(alphas, frames[1:], strict=True):
        step = int((steps.t - frame.t).abs().argmin()) - 1
        assert alpha[0] == steps.alpha_t[step]
