"""Laws of what is kept: nothing is computed twice, nothing is mistaken for something else, damage is said."""

import numpy as np
import pytest

from adlm.errors import UserError
from adlm.evaluation.generation.cache import PART, compute_in_parts, texts_sha256


class Doubling:
    """A long computation that counts how often it is asked, and may be interrupted."""

    def __init__(self, last: int = 10**9):
        self.asked, self.last = 0, last

    def __call__(self, part):
        self.asked += 1
        if self.asked > self.last:
            raise KeyboardInterrupt
        return {"twice": 2 * np.array(part)}


def fits(part, arrays):
    return "twice" in arrays and len(arrays["twice"]) == len(part)


def gathered(items, compute, folder, about=None, told=None):
    tell = (lambda done: None) if told is None else told.append
    parts = list(compute_in_parts(items, compute, fits, "twice", about or {"of": texts_sha256(items)}, folder, tell))
    return np.concatenate([part["twice"] for part in parts]).tolist()


ITEMS = list(range(2 * PART + 5))


def test_what_was_cut_goes_on_where_it_was_and_the_last_part_counts(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        gathered(ITEMS, Doubling(last=2), tmp_path)
    again, told = Doubling(), []
    assert gathered(ITEMS, again, tmp_path, told=told) == [2 * item for item in ITEMS]
    assert again.asked == 1
    assert told == [PART, 2 * PART, 2 * PART + 5]
    third = Doubling(last=0)
    assert gathered(ITEMS, third, tmp_path) == [2 * item for item in ITEMS]


def test_without_a_folder_nothing_is_kept():
    compute = Doubling()
    for _ in range(2):
        gathered(ITEMS, compute, None)
    assert compute.asked == 6


def test_what_was_made_from_something_else_is_not_taken(tmp_path):
    gathered(ITEMS, Doubling(), tmp_path)
    other = Doubling()
    gathered(ITEMS, other, tmp_path, about={"of": texts_sha256(ITEMS), "judge": "another"})
    assert other.asked == 3
    assert texts_sha256(["ab", "c"]) != texts_sha256(["a", "bc"])


def test_a_damaged_part_is_said_and_not_taken(tmp_path):
    gathered(ITEMS, Doubling(), tmp_path)
    part = next(tmp_path.glob("twice-*/00001.npz"))
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(UserError, match=r"00001.npz is damaged; delete it"):
        gathered(ITEMS, Doubling(), tmp_path)
    with part.open("wb") as file:
        np.savez(file, others=np.zeros(PART))
    with pytest.raises(UserError, match=r"00001.npz is damaged; delete it"):
        gathered(ITEMS, Doubling(), tmp_path)


def test_processes_that_read_different_texts_make_nothing_together(monkeypatch):
    """A file of samples that still grows: the second process had begun before the last texts were there."""
    monkeypatch.setattr("adlm.distributed.rank_and_size", lambda: (0, 2))
    monkeypatch.setattr("adlm.distributed.gather", lambda share: [*share, ("of fewer texts", {})])
    with pytest.raises(UserError, match="processes read different texts; wait until the files are written"):
        gathered(ITEMS[: PART + 1], Doubling(), None)
