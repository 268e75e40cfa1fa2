"""remdm-conf, against a chain whose state includes the probability of each drawn token."""

import itertools
from collections import defaultdict

import torch
from worlds import Table, World, chi_square, quarters, real

from adlm.config.schema import Sampling
from adlm.diffusion.masking import remasking_ceiling
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.adaptive import confident_remasking, sample_remdm_conf
from adlm.sampling.frame import SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import steps_of


def distribution(world, beliefs, steps):
    """The distribution of final texts, from the chain over states (ids, probability each was drawn with)."""
    index = {tuple(state.tolist()): number for number, state in enumerate(world.states)}
    at = {((world.mask_id,) * world.length, (0.0,) * world.length): 1.0}
    ceilings = remasking_ceiling(steps.alpha_s, steps.alpha_t)
    for step in range(len(steps.reveal)):
        after = defaultdict(float)
        for (ids, chances), weight in at.items():
            visible = [position for position in range(world.length) if ids[position] != world.mask_id]
            total = sum(torch.exp(real(-chances[position])) for position in visible)
            outcomes = []
            for position in range(world.length):
                here = beliefs[index[ids], position]
                if position in visible:
                    sigma = float(torch.exp(real(-chances[position])) / total * ceilings[step])
                    outcomes.append([(ids[position], chances[position], 1 - sigma), (world.mask_id, 0.0, sigma)])
                else:
                    reveal = float(steps.reveal[step])
                    words = [(word, float(here[word]), reveal * float(here[word])) for word in range(world.mask_id)]
                    outcomes.append([*words, (world.mask_id, 0.0, 1 - reveal)])
            for together in itertools.product(*outcomes):
                probability = weight
                for _, _, each in together:
                    probability *= each
                after[tuple(o[0] for o in together), tuple(o[1] for o in together)] += probability
        at = after
    texts = torch.zeros(len(world.texts), dtype=torch.float64)
    for (ids, _), weight in at.items():
        guess = beliefs[index[ids]].argmax(dim=-1)
        filled = [int(guess[p]) if ids[p] == world.mask_id else ids[p] for p in range(world.length)]
        texts[int(sum(word * world.mask_id ** (world.length - 1 - p) for p, word in enumerate(filled)))] += weight
    return texts


def test_final_texts_have_the_distribution_of_the_chain():
    world = World.random(words=2, length=3)
    beliefs, sampling = quarters(world), Sampling("remdm-conf", steps=4, t_end=0.1)
    steps, rows = steps_of(LogLinear(), sampling), 20_000
    canvas = torch.full((rows, 3), world.mask_id)
    frames = list(
        sample_remdm_conf(
            SamplingRun(Table(world, beliefs), canvas, world.mask_id, steps, sampling, RowRng(0, range(rows)))
        )
    )
    position_values = 2 ** torch.arange(2, -1, -1)
    counts = torch.bincount((frames[-1].ids * position_values).sum(dim=1), minlength=8)
    assert any(frame.remasked.any() for frame in frames)
    assert (
        chi_square(counts, rows * distribution(world, beliefs, steps)) < 24.3
    )  # 7 degrees of freedom: once in a thousand seeds


def test_tokens_drawn_with_less_confidence_are_remasked_more_often_and_given_tokens_never():
    chance, drawn = real([[0.9, 0.1, 1.0, 0.0]]), torch.tensor([[True, True, False, False]])
    sigma = confident_remasking(chance, drawn, real(0.5))
    assert sigma[0, 1] > sigma[0, 0] > 0
    assert torch.allclose(sigma.sum(), real(0.5))
    assert (sigma[0, 2:] == 0).all()


def test_a_row_without_drawn_tokens_remasks_nothing():
    sigma = confident_remasking(real([[0.9, 0.1]]), torch.zeros(1, 2, dtype=torch.bool), real(1.0))
    assert (sigma == 0).all()


class Remote(torch.Tensor):
    """A tensor that stands for one on a device: operations that make the host wait are counted."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("cpu", "item", "tolist", "nonzero", "__bool__"):
            cls.waits += 1
            return function(*(arg.as_subclass(torch.Tensor) for arg in args))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_the_host_waits_for_its_device_once_a_step():
    world = World.random(words=2, length=3)
    sampling = Sampling("remdm-conf", steps=200)
    table = Table(world, quarters(world))
    table.log_beliefs = table.log_beliefs.as_subclass(Remote)
    canvas = torch.full((2, 3), world.mask_id).as_subclass(Remote)
    Remote.waits = 0
    steps, rng = steps_of(LogLinear(), sampling), RowRng(0, range(2))
    frames = list(sample_remdm_conf(SamplingRun(table, canvas, world.mask_id, steps, sampling, rng)))
    assert Remote.waits == 1 + sum(bool(frame.revealed.any()) for frame in frames)  # 1 for the canvas


def test_steps_without_changes_need_no_network_call():
    world = World.random(words=2, length=3)
    table, sampling = Table(world, quarters(world)), Sampling("remdm-conf", steps=200)
    canvas = torch.full((1, 3), world.mask_id)
    frames = list(
        sample_remdm_conf(
            SamplingRun(table, canvas, world.mask_id, steps_of(LogLinear(), sampling), sampling, RowRng(0, [0]))
        )
    )
    assert table.calls <= len(frames) < 100
    assert (frames[-1].ids != world.mask_id).all()
