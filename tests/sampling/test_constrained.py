"""Constrained holes: the distribution of every sampler's steps, by listing all texts and forcing all draws."""

import itertools
import os
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from forced_draws import every_outcome
from worlds import Table, TableOutput, World, seeded

from adlm.config.schema import Sampling
from adlm.constraints import conditioning, together
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.holes import ConstrainedHole, fitted
from adlm.constraints.patterns import byte_automaton
from adlm.diffusion.schedules import LogLinear
from adlm.registry import SAMPLERS
from adlm.sampling import constrained
from adlm.sampling.frame import Row, SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sampler_of, steps_of

SEED = 2  # with which every sampler that remasks does so below
WORDS, LENGTH = "abc", 3
PATTERN = "a*b?c|bab|cb[ac]|acb"
MASK = len(WORDS)
TEXTS = [
    x for x in itertools.product(range(MASK), repeat=LENGTH) if re.fullmatch(PATTERN, "".join(WORDS[i] for i in x))
]


class RatedTable(Table):
    """A table with rates that do not depend on the state."""

    def __call__(self, noisy):
        output = super().__call__(noisy)
        output.log_rates = lambda positions: (positions % LENGTH).double()
        return output


def hole(row=0, pattern=PATTERN):
    pieces = pieces_of({index: word.encode() for index, word in enumerate(WORDS)})
    return ConstrainedHole(row, (0,), fitted(compile_tokens(byte_automaton(pattern), pieces, pattern), LENGTH))


def world_and_beliefs():
    world = World.random(words=MASK, length=LENGTH)
    return world, world.random_beliefs()


def run_of(sampling, rng=None, holes=None, rows=1):
    world, beliefs = world_and_beliefs()
    canvas = torch.full((rows, LENGTH), MASK)
    steps = steps_of(LogLinear(), sampling)
    holes = tuple(hole(row) for row in range(rows)) if holes is None else holes
    rng = RowRng(SEED, range(rows)) if rng is None else rng
    return SamplingRun(RatedTable(world, beliefs), canvas, MASK, steps, sampling, rng, row=Row(LENGTH), holes=holes)


def frames_of(run):
    return list(sampler_of(run.sampling).sample(run))


def texts_and_frames(sampling, monkeypatch):
    """The exact distribution of final texts for the positions that SEED draws, and the frames of one outcome."""

    def draw(choose):
        monkeypatch.setattr(conditioning, "draw_class", lambda weights, uniform: (choose(weights), 0.5))
        in_class = lambda weights, uniforms: torch.tensor([choose(row) for row in weights])  # noqa: E731
        monkeypatch.setattr(constrained, "categorical", in_class)
        return frames_of(run_of(sampling))

    texts, frames = defaultdict(float), None
    for frames, chance in every_outcome(draw):
        texts[tuple(frames[-1].ids[0].tolist())] += chance
    return texts, frames


def joint(state, beliefs, power=1.0, allowed=lambda place, word: True):
    """p(x) of every text that satisfies the constraint and has the visible tokens of the state."""
    weights = {}
    for x in TEXTS:
        masked = [place for place in range(LENGTH) if state[place] == MASK]
        if all(state[place] in (MASK, x[place]) for place in range(LENGTH)) and all(allowed(p, x[p]) for p in masked):
            weights[x] = float(torch.stack([beliefs[place, x[place]] ** power for place in masked]).prod())
    total = sum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


def marginals_of(texts):
    found = torch.zeros(LENGTH, MASK, dtype=torch.float64)
    for x, weight in texts.items():
        found[range(LENGTH), x] += weight
    return found


def shaped_joint(state, beliefs, sampling):
    """`joint` after temperature and top-k, which keeps the tokens of the likeliest text too."""
    texts = joint(state, beliefs, 1 / sampling.temperature)
    if sampling.top_k:
        marginals, best = marginals_of(texts), max(texts, key=texts.get)
        kept = marginals.topk(sampling.top_k, dim=-1).indices.tolist()
        texts = joint(state, beliefs, 1 / sampling.temperature, lambda p, word: word in kept[p] or word == best[p])
    return texts


def chain(frames, sampling):
    """The distribution of final texts if each frame reveals and remasks what it did, whatever the tokens."""
    world, beliefs = world_and_beliefs()
    index = {tuple(state): number for number, state in enumerate(world.states.tolist())}
    states = {(MASK,) * LENGTH: 1.0}
    for frame in frames[1:]:
        revealed, remasked = frame.revealed[0].tolist(), frame.remasked[0].tolist()
        after = defaultdict(float)
        for state, weight in states.items():
            state = tuple(MASK if masked else token for token, masked in zip(state, remasked, strict=True))
            for x, share in shaped_joint(state, beliefs[index[state]], sampling).items():
                after[tuple(x[p] if revealed[p] else state[p] for p in range(LENGTH))] += weight * share
        states = after
    return states


def assert_same(found, expected):
    assert {x: p for x, p in found.items() if p} == pytest.approx({x: p for x, p in expected.items() if p}, abs=1e-12)


BY_POSITION = [
    Sampling("ancestral", steps=3, final="draw"),
    Sampling("ancestral", steps=3, final="draw", temperature=0.6),
    Sampling("ancestral", steps=3, final="draw", top_k=1),
    Sampling("ancestral", steps=3, final="draw", top_k=2, temperature=1.5),
    Sampling("analytic", steps=2),
    Sampling("semi-autoregressive", steps=2, final="draw"),
    Sampling("remdm-cap", steps=3, eta=0.9, final="draw"),
    Sampling("remdm-rescale", steps=3, eta=0.9, final="draw"),
    Sampling("remdm-loop", steps=4, eta=0.6, alpha_on=0.6, final="draw"),
    Sampling("forward-backward", steps=3, final="draw"),
    Sampling("dfm", steps=2, final="draw"),
    Sampling("remdm-conf", steps=1, t_end=0.5, final="draw"),  # later steps remask by what was drawn
    Sampling("left-to-right", steps=2),
    Sampling("rates", steps=2),
    Sampling("anchor-first", steps=1),
]


@pytest.mark.parametrize("sampling", BY_POSITION, ids=lambda s: f"{s.sampler}-{s.temperature}-{s.top_k}")
def test_each_step_draws_from_the_product_of_beliefs_given_the_constraint(sampling, monkeypatch):
    found, frames = texts_and_frames(sampling, monkeypatch)
    assert {*found} <= {*TEXTS}
    remasks = SAMPLERS[sampling.sampler].remasks and sampling.sampler != "remdm-conf"
    assert any(frame.remasked.any() for frame in frames) == remasks
    assert_same(found, chain(frames, sampling))


def score(sampler, marginals, word):
    best = marginals.sort(descending=True).values
    if sampler in ("confidence", "threshold"):
        return float(marginals[word])
    if sampler == "entropy":
        return -float(torch.special.entr(marginals).sum())
    return float(best[0] - best[1]) if sampler == "margin" else float(best[0])


@pytest.mark.parametrize("sampler", ["confidence", "certainty", "margin", "entropy", "threshold"])
def test_orders_use_conditioned_marginals(sampler, monkeypatch):
    """Draw all masks jointly, reveal the best by their conditioned marginals, and repeat."""
    sampling = Sampling(sampler, steps=2, threshold=0.6)
    world, beliefs = world_and_beliefs()
    index = {tuple(state): number for number, state in enumerate(world.states.tolist())}
    expected = defaultdict(float)

    def recurse(state, step, weight):
        masks = [place for place in range(LENGTH) if state[place] == MASK]
        if not masks:
            expected[state] += weight
            return
        texts = joint(state, beliefs[index[state]])
        marginals = marginals_of(texts)
        for x, share in texts.items():
            scores = {place: score(sampler, marginals[place], x[place]) for place in masks}
            ranked = sorted(masks, key=lambda place: (-round(scores[place], 6), place))
            if sampler == "threshold":
                chosen = [place for place in masks if scores[place] >= 0.6] or ranked[:1]
            else:
                chosen = ranked[: LENGTH * (step + 1) // 2 - (LENGTH - len(masks))]
            after = tuple(x[place] if place in chosen else state[place] for place in range(LENGTH))
            recurse(after, step + 1, weight * share)

    recurse((MASK,) * LENGTH, 0, 1.0)
    assert_same(texts_and_frames(sampling, monkeypatch)[0], expected)


def test_every_sampler_that_is_constrained_is_tested_here():
    tested = {sampling.sampler for sampling in BY_POSITION}
    tested |= {"confidence", "certainty", "margin", "entropy", "threshold"}
    tested |= {"speculative"}  # in tests/methods/test_block_causal_constraints.py
    assert {name for name in SAMPLERS if SAMPLERS[name].constrained} == tested


def test_temperature_0_and_the_final_argmax_take_the_likeliest_text():
    _, beliefs = world_and_beliefs()
    texts = joint((MASK,) * LENGTH, beliefs[-1])
    best = max(texts, key=texts.get)
    greedy = Sampling("confidence", steps=1, temperature=0.0)
    final = Sampling("ancestral", steps=1, t_end=0.999999)  # all is revealed by the last call
    frames = {sampling: frames_of(run_of(sampling))[-1] for sampling in (greedy, final)}
    assert all(tuple(frame.ids[0].tolist()) == best for frame in frames.values())
    assert frames[greedy].chance.tolist() == [[1.0] * LENGTH]
    assert torch.allclose(frames[final].chance[0].double(), marginals_of(texts)[range(LENGTH), best], atol=1e-6)


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("ancestral", {"top_p": 0.3}),
        ("remdm-cap", {"top_k": 1, "temperature": 2.0}),
        ("remdm-conf", {}),
        ("confidence", {"repetition_penalty": 3.0}),
        ("rates", {"top_p": 0.3, "repetition_penalty": 2.0}),
    ],
)
def test_a_row_is_the_same_alone_and_in_a_batch_and_satisfies_its_constraint(sampler, options):
    """Rows 0 and 2 are constrained, row 1 is as it would be without any constraint."""
    sampling = Sampling(sampler, steps=4, **options)
    holes = (hole(0), hole(2, "b.*"))
    together = frames_of(run_of(sampling, holes=holes, rows=3))[-1]
    for row, own in enumerate(((hole(0),), (), (hole(0, "b.*"),))):
        alone = frames_of(run_of(sampling, RowRng(SEED, [row]), own))[-1]
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.chance[0], together.chance[row])
    assert tuple(together.ids[0].tolist()) in TEXTS
    assert int(together.ids[2, 0]) == 1


def test_positions_outside_the_hole_are_drawn_as_without_it():
    sampling = Sampling("ancestral", steps=1, t_end=0.999999, final="draw")
    pieces = pieces_of({index: word.encode() for index, word in enumerate(WORDS)})
    middle = ConstrainedHole(0, (1,), fitted(compile_tokens(byte_automaton("b"), pieces, "b"), 1))
    for seed in range(5):
        free = frames_of(run_of(sampling, RowRng(seed, [0]), ()))[-1].ids[0]
        held = frames_of(run_of(sampling, RowRng(seed, [0]), (middle,)))[-1].ids[0]
        assert int(held[1]) == 1
        assert held[[0, 2]].tolist() == free[[0, 2]].tolist()


def test_beliefs_that_are_not_finite_are_a_user_error():
    run = run_of(Sampling("ancestral", steps=1))
    nothing = torch.full((LENGTH, MASK + 1), torch.nan)
    damaged = replace(run, denoiser=lambda noisy: TableOutput(nothing, nothing))
    with pytest.raises(ValueError, match="the model's beliefs are not finite"):
        frames_of(damaged)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sampler", ["ancestral", "remdm-cap", "remdm-loop", "remdm-conf"])
@pytest.mark.parametrize(
    ("named", "options"),
    [(False, {}), (True, {}), (False, {"t_end": 0.4}), (False, {"top_p": 0.7}), (False, {"top_k": 1})],
)
def test_interpreted_kernels_draw_the_tokens_of_the_plain_form(sampler, named, options, monkeypatch):
    """Rows with a hole each, or two of one name; some have none. Shaped beliefs are left to the plain form."""
    starts = (0, LENGTH + 1) if named else (0,)
    automaton, generator = hole().automaton, seeded(3)
    beliefs = torch.randn(2 * LENGTH + 1, MASK + 1, generator=generator)
    beliefs[:, MASK] = -torch.inf

    class Independent:
        def log_beliefs(self, positions):
            return beliefs.log_softmax(dim=-1)[positions % len(beliefs)]

    def frames():
        sampling = Sampling(sampler, steps=8, **options)
        holes = tuple(ConstrainedHole(row, starts, automaton) for row in (0, 1, 3, 4))
        canvas = torch.full((5, len(beliefs)), MASK)
        rng = RowRng(SEED, range(5))
        denoiser = lambda noisy: Independent()  # noqa: E731
        steps = steps_of(LogLinear(), sampling)
        return frames_of(SamplingRun(denoiser, canvas, MASK, steps, sampling, rng, holes=holes))

    plain = frames()
    monkeypatch.setattr(together, "BLOCK", 16)
    monkeypatch.setattr(constrained, "has_kernels", lambda tensor: True)
    if sampler != "ancestral":
        assert any(frame.remasked[:, :LENGTH].any() for frame in plain)
    calls = []
    monkeypatch.setattr(constrained, "MAX_POSITIONS", 2 * len(starts) * LENGTH)  # two holes at once
    monkeypatch.setattr(constrained, "draw_together", lambda *given: calls.append(1) or together.draw_together(*given))
    for ours, expected in zip(frames(), plain, strict=True):
        assert ours.ids.tolist() == expected.ids.tolist()
        torch.testing.assert_close(ours.chance, expected.chance, rtol=1e-5, atol=0)
    assert bool(calls) == (options.keys() <= {"t_end"})
