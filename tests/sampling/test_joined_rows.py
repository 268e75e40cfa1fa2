"""Rows that join and leave between network calls are sampled as each of them alone, to the last bit."""

import os
import random
import re

import pytest
import torch
from worlds import randomized

from adlm.config.schema import Config, Model, Sampling, Schedule
from adlm.constraints.automaton import token_automaton
from adlm.constraints.holes import ConstrainedHole, fitted
from adlm.constraints.together import draw_together
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.sampling import constrained
from adlm.sampling.events import JoinedRows, sample_positions_first
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import load_tokenizer

LENGTH, BATCH = 24, 3
OPTIONS = [
    Sampling(steps=6),
    Sampling(steps=30, temperature=0.6, top_k=20),
    Sampling("remdm-cap", steps=12, eta=0.2, top_p=0.8),
    Sampling("remdm-loop", steps=10, t_on=0.7, t_off=0.3, alpha_on=0.6, eta=0.1, repetition_penalty=1.3),
    Sampling("forward-backward", steps=5, t_end=0.3, final="draw"),
    Sampling("remdm-rescale", steps=7, t_end=0.5, eta=0.4, temperature=0.0),
]


def runs_of(method: str, time_conditioning: bool):
    """Runs of one row each, with prompts, holes and padding of different lengths, and all options.

    Every other row has a constraint at positions 10 to 12.
    """
    word = fitted(token_automaton("[a-z]o+|no!", load_tokenizer("bytes")), 3)
    config = Config(
        method=method,
        tokenizer="bytes",
        vocabulary=load_tokenizer("bytes").vocabulary,
        length=LENGTH,
        model=Model(hidden=32, heads=2, blocks=2, condition=8, time_conditioning=time_conditioning),
        schedule=Schedule(eps=1e-3),
    )
    built = method_of(config)
    network = FrozenNetwork(randomized(built.build()), batch=BATCH)
    for number in range(12):
        canvas, pad = torch.full((1, LENGTH), built.mask_id), torch.zeros(1, LENGTH, dtype=torch.bool)
        canvas[:, : 1 + number % 5], canvas[:, 9], canvas[:, LENGTH - number :] = 65 + number, 70, 0
        pad[:, LENGTH - number :] = True
        sampling, rng = OPTIONS[number % len(OPTIONS)], RowRng(number % 4, [number])
        holes = (ConstrainedHole(0, (10,), word),) if number // len(OPTIONS) == number % 2 else ()
        yield built.generate(network, canvas, sampling, rng, pad, holes).run


needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets the kernels
@pytest.mark.parametrize(
    ("method", "time_conditioning", "kernels"),
    [("adlm", False, False), ("mdlm", True, False), pytest.param("mdlm", True, True, marks=needs_interpreter)],
)
def test_a_row_has_the_same_bits_alone_and_among_rows_at_other_steps_with_other_options(
    method, time_conditioning, kernels, monkeypatch
):
    calls = []
    if kernels:
        monkeypatch.setattr(constrained, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(constrained, "draw_together", lambda *given: calls.append(1) or draw_together(*given))
    alone = [last_frame(sample_positions_first(run)) for run in runs_of(method, time_conditioning)]
    waiting = list(enumerate(runs_of(method, time_conditioning)))
    rows, running, rng = JoinedRows(waiting[0][1]), {}, random.Random(0)
    numbers_of_rows = set()
    while waiting or running:
        while waiting and (not running or rng.random() < 0.7):
            number, run = waiting.pop()
            running[number] = rows.join(run)
        turn = rng.sample(sorted(running), min(len(running), rng.randint(1, BATCH)))  # the others wait
        numbers_of_rows.add(len(turn))
        all_ids, all_chance = rows.step([running[number] for number in turn])
        for number, ids, chance in zip(turn, all_ids, all_chance, strict=True):
            if not running[number].num_calls:
                assert torch.equal(ids, alone[number].ids[0])
                assert torch.equal(chance, alone[number].chance[0])
                rows.leave(running.pop(number))
        if running and rng.random() < 0.1:  # a row that leaves early comes back later
            number, row = running.popitem()
            rows.leave(row)
            waiting.append((number, list(runs_of(method, time_conditioning))[number]))
    assert numbers_of_rows == {1, 2, 3}
    assert bool(calls) == kernels
    assert len({tuple(frame.ids[0].tolist()) for frame in alone}) == len(alone)
    texts = [bytes(alone[number].ids[0, 10:13].tolist()).decode() for number in (0, 2, 4, 7, 9, 11)]
    assert all(re.fullmatch("[a-z]o+|no!", text) for text in texts)
