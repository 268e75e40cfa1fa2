"""Left-to-right sampling, by enumeration of all texts."""

import itertools

import torch
from worlds import FixedRng, real, seeded

from adlm.config.schema import Sampling
from adlm.sampling.left_to_right import sample_left_to_right, sampler_from_model
from adlm.sampling.rng import RowRng

MASK = 2


class Prefixes:
    """A model whose next-word beliefs, all quarters, depend on the full prefix; records the lengths of its inputs."""

    def __init__(self, length, seed=0):
        first = torch.randint(1, 4, (2 ** (length + 1),), generator=seeded(seed)).double() / 4
        self.beliefs = torch.stack([first, 1 - first, torch.zeros_like(first)], dim=-1)
        self.state, self.read = None, []

    def __call__(self, ids):
        self.read.append(ids.shape[1])
        state = torch.ones(len(ids), dtype=torch.int64) if self.state is None else self.state
        for column in ids.T:
            state = 2 * state + column
        self.state = state
        return self.beliefs[state].log()


def test_the_probability_of_a_text_is_the_product_of_its_beliefs():
    uniforms = [list(each) for each in itertools.product([0.125, 0.375, 0.625, 0.875], repeat=3)]
    canvas = torch.tensor([[1, MASK, MASK, MASK]]).expand(len(uniforms), 4)
    *_, last = sample_left_to_right(
        sampler_from_model(Prefixes(5), Sampling()), canvas, MASK, FixedRng([[]] * len(uniforms), uniforms)
    )
    beliefs = Prefixes(5).beliefs
    for text in itertools.product(range(2), repeat=3):
        state, probability = 3, 1.0  # 1, then the given 1
        for word in text:
            probability *= float(beliefs[state, word])
            state = 2 * state + word
        ours = (last.ids[:, 1:] == torch.tensor(text)).all(dim=1).double().mean()
        assert torch.allclose(ours, real(probability))


def test_rows_with_prompts_of_different_lengths_draw_as_if_alone():
    canvas = torch.tensor([[1, MASK, MASK, MASK, MASK], [0, 1, 0, MASK, MASK], [1, 1, 0, 1, MASK]])
    frames = list(sample_left_to_right(sampler_from_model(Prefixes(6), Sampling()), canvas, MASK, RowRng(0, range(3))))
    given = canvas != MASK
    assert all(torch.equal(frame.ids[given], canvas[given]) for frame in frames)
    for row in range(3):
        next_token = sampler_from_model(Prefixes(6), Sampling())
        *_, alone = sample_left_to_right(next_token, canvas[row : row + 1], MASK, RowRng(0, [row]))
        assert torch.equal(alone.ids[0], frames[-1].ids[row])


def test_a_prompt_is_read_in_one_call_and_every_token_once():
    model = Prefixes(6)
    canvas = torch.tensor([[1, 0, 1, MASK, MASK, MASK]])
    list(sample_left_to_right(sampler_from_model(model, Sampling()), canvas, MASK, RowRng(0, [0])))
    assert model.read == [3, 1, 1]  # the last token is not read: nothing comes after it
