"""Laws of the sliding window."""

import torch
from worlds import seeded

from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.windows import windowed_walk

MASK = 9


def counting_walk(seen):
    """Fills each mask with the number of the window, in one step, and remembers what it saw."""

    def walk(canvas, pad):
        seen.append((canvas.clone(), pad))
        yield first_frame(canvas, MASK)
        masked = canvas == MASK
        ids = torch.where(masked, len(seen), canvas)
        chance = torch.where(masked, 0.5, 1.0)
        zero = torch.zeros(len(canvas), dtype=torch.float64)
        yield Frame(ids, zero, masked, torch.zeros_like(masked), chance, canvas, zero)

    return walk


def test_what_a_window_leaves_behind_is_the_next_ones_prompt():
    seen = []
    canvas = torch.full((2, 10), MASK)
    canvas[1, 7] = 0
    frames = list(windowed_walk(counting_walk(seen), canvas, MASK, length=4, stride=3))
    assert frames[-1].ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 2, 2, 2, 0, 3, 3]]
    assert seen[1][0][0].tolist() == [1, MASK, MASK, MASK]
    assert torch.equal(frames[0].ids, canvas)


def test_the_last_window_ends_with_the_canvas():
    seen = []
    *_, last = windowed_walk(counting_walk(seen), torch.full((1, 9), MASK), MASK, length=4, stride=3)
    assert [tuple(window.shape) for window, _ in seen] == [(1, 4)] * 3
    assert last.ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3]]


def test_frames_are_of_the_whole_canvas_and_keep_the_chances_of_earlier_windows():
    frames = list(windowed_walk(counting_walk([]), torch.full((1, 6), MASK), MASK, length=4, stride=2))
    assert all(frame.ids.shape == (1, 6) for frame in frames)
    assert frames[1].chance.tolist() == [[0.5, 0.5, 0.5, 0.5, 0.0, 0.0]]
    assert frames[2].chance.tolist() == [[0.5] * 6]
    assert frames[2].revealed.tolist() == [[False] * 4 + [True] * 2]


def test_windows_with_nothing_to_fill_are_not_walked():
    seen = []
    canvas = torch.randint(0, 5, (1, 12), generator=seeded())
    canvas[0, 0] = canvas[0, 11] = MASK
    list(windowed_walk(counting_walk(seen), canvas, MASK, length=4, stride=4))
    assert len(seen) == 2


def test_a_canvas_no_longer_than_the_window_is_walked_at_once():
    seen = []
    list(windowed_walk(counting_walk(seen), torch.full((1, 3), MASK), MASK, length=4, stride=2))
    assert len(seen) == 1
