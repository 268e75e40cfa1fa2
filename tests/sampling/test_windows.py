"""The sliding window for texts longer than the model."""

import torch
from worlds import Table, World, chi_square, seeded

from adlm.config.schema import Sampling
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Frame, SamplingRun, first_frame, last_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sample_windows, steps_of, with_boundaries

MASK = 9


def counting_sampler(seen):
    """A sampler that fills each mask with the number of the window, in one step, and records its inputs in `seen`."""

    def sample(canvas):
        seen.append(canvas.clone())
        yield first_frame(canvas, MASK)
        masked = canvas == MASK
        ids = torch.where(masked, len(seen), canvas)
        chance = torch.where(masked, 0.5, 1.0)
        zero = torch.zeros(len(canvas), dtype=torch.float64)
        yield Frame(ids, zero, masked, torch.zeros_like(masked), chance, canvas, zero)

    return sample


def test_filled_tokens_are_the_prompt_of_the_next_window():
    seen = []
    canvas = torch.full((2, 10), MASK)
    canvas[1, 7] = 0
    frames = list(sample_windows(counting_sampler(seen), canvas, MASK, length=4, stride=3))
    assert frames[-1].ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 2, 2, 2, 0, 3, 3]]
    assert seen[1][0].tolist() == [1, MASK, MASK, MASK]
    assert torch.equal(frames[0].ids, canvas)


def test_the_last_window_ends_with_the_canvas():
    seen = []
    *_, last = sample_windows(counting_sampler(seen), torch.full((1, 9), MASK), MASK, length=4, stride=3)
    assert [tuple(window.shape) for window in seen] == [(1, 4)] * 3
    assert last.ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3]]


def test_frames_are_of_the_whole_canvas_and_keep_the_probabilities_of_earlier_windows():
    frames = list(sample_windows(counting_sampler([]), torch.full((1, 6), MASK), MASK, length=4, stride=2))
    assert all(frame.ids.shape == (1, 6) for frame in frames)
    assert frames[1].chance.tolist() == [[0.5, 0.5, 0.5, 0.5, 0.0, 0.0]]
    assert frames[2].chance.tolist() == [[0.5] * 6]
    assert frames[2].revealed.tolist() == [[False] * 4 + [True] * 2]


def test_windows_without_masks_are_skipped():
    seen = []
    canvas = torch.randint(0, 5, (1, 12), generator=seeded())
    canvas[0, 0] = canvas[0, 11] = MASK
    list(sample_windows(counting_sampler(seen), canvas, MASK, length=4, stride=4))
    assert len(seen) == 2


def test_a_canvas_no_longer_than_the_window_is_sampled_in_one_window():
    seen = []
    list(sample_windows(counting_sampler(seen), torch.full((1, 3), MASK), MASK, length=4, stride=2))
    assert len(seen) == 1


def test_with_boundaries_reads_the_window_between_given_ids_and_returns_the_window_alone():
    seen = []
    canvas = torch.tensor([[5, MASK, MASK]])
    first, last = with_boundaries(counting_sampler(seen), [7], [8])(canvas)
    assert seen[0].tolist() == [[7, 5, MASK, MASK, 8]]
    assert (first.ids.tolist(), last.ids.tolist()) == ([[5, MASK, MASK]], [[5, 1, 1]])
    assert last.revealed.tolist() == [[False, True, True]]
    assert last.read.tolist() == canvas.tolist()
    for part in (last.remasked, last.chance):
        assert part.shape == (1, 3)


def test_windows_with_boundaries_sample_the_language_that_rows_are_cut_from():
    """Rows are [end] x y [end], cut anywhere from a Markov chain of two words. With exact beliefs, windows of two words
    and stride 1 sample the chain at any length; windows without boundaries would put ends inside it."""
    end, first = 2, torch.tensor([0.6, 0.4], dtype=torch.float64)
    then = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)  # stationary: (0.6, 0.4) is preserved
    rows = World(words=3, length=4, probabilities=torch.zeros(81, dtype=torch.float64))
    for number, (left, x, y, right) in enumerate(rows.texts.tolist()):
        if left == right == end and end not in (x, y):
            rows.probabilities[number] = first[x] * then[x, y]
    sampling, rng = Sampling("semi-autoregressive", steps=4000), RowRng(0, range(8000))
    steps, table = steps_of(LogLinear(), sampling), Table(rows, rows.exact_beliefs())

    def ancestral(canvas):
        return sample_positions_first(SamplingRun(table, canvas, rows.mask_id, steps, sampling, rng))

    canvas = torch.full((8000, 4), rows.mask_id)
    texts = last_frame(
        sample_windows(with_boundaries(ancestral, [end], [end]), canvas, rows.mask_id, length=2, stride=1)
    ).ids
    assert (texts != end).all()
    chain = torch.einsum("a,ab,bc,cd->abcd", first, then, then, then).flatten()
    counts = torch.bincount((texts * torch.tensor([8, 4, 2, 1])).sum(dim=1), minlength=16)
    assert chi_square(counts, 8000 * chain) < 37.7  # 15 degrees of freedom: once in a thousand seeds
