"""The cache: nothing is computed twice, results of other inputs are not used, damaged files are an error."""

import numpy as np
import pytest

from adlm.apps.judge.pipeline import TEXTS_PER_PART, PartCache, json_sha256
from adlm.errors import UserError


class Doubling:
    """A computation that counts its calls and may be interrupted."""

    def __init__(self, last: int = 10**9):
        self.asked, self.last = 0, last

    def __call__(self, part):
        self.asked += 1
        if self.asked > self.last:
            raise KeyboardInterrupt
        return {"twice": 2 * np.array(part)}


def fits(part, arrays):
    return "twice" in arrays and len(arrays["twice"]) == len(part)


def gathered(items, compute, folder, about=None, reported=None):
    def report_progress(stage, done, total):
        if reported is not None:
            reported.append(done)

    cache = PartCache(folder, report_progress)
    parts = cache.compute(items, compute, fits, "twice", about or {"of": json_sha256(items)}, "doubling")
    return np.concatenate([part["twice"] for part in parts]).tolist()


ITEMS = list(range(2 * TEXTS_PER_PART + 5))


def test_an_interrupted_computation_resumes_and_includes_the_incomplete_last_part(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        gathered(ITEMS, Doubling(last=2), tmp_path)
    again, reported = Doubling(), []
    assert gathered(ITEMS, again, tmp_path, reported=reported) == [2 * item for item in ITEMS]
    assert again.asked == 1
    assert reported == [TEXTS_PER_PART, 2 * TEXTS_PER_PART, 2 * TEXTS_PER_PART + 5]
    third = Doubling(last=0)
    assert gathered(ITEMS, third, tmp_path) == [2 * item for item in ITEMS]


def test_without_a_folder_nothing_is_cached():
    compute = Doubling()
    for _ in range(2):
        gathered(ITEMS, compute, None)
    assert compute.asked == 6


def test_results_of_other_inputs_are_not_used(tmp_path):
    gathered(ITEMS, Doubling(), tmp_path)
    other = Doubling()
    gathered(ITEMS, other, tmp_path, about={"of": json_sha256(ITEMS), "judge": "another"})
    assert other.asked == 3
    assert json_sha256(["ab", "c"]) != json_sha256(["a", "bc"])


def test_a_damaged_part_is_an_error(tmp_path):
    gathered(ITEMS, Doubling(), tmp_path)
    part = next(tmp_path.glob("twice-*/00001.npz"))
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(UserError, match=r"00001.npz is damaged; delete it"):
        gathered(ITEMS, Doubling(), tmp_path)
    with part.open("wb") as file:
        np.savez(file, others=np.zeros(TEXTS_PER_PART))
    with pytest.raises(UserError, match=r"00001.npz is damaged; delete it"):
        gathered(ITEMS, Doubling(), tmp_path)


def test_processes_that_read_different_texts_are_an_error(monkeypatch):
    """A samples file that still grows: the second process started before the last texts were written."""
    monkeypatch.setattr("adlm.distributed.rank_and_size", lambda: (0, 2))
    monkeypatch.setattr("adlm.distributed.gather", lambda share: [*share, ("of fewer texts", {})])
    with pytest.raises(UserError, match="processes read different texts; wait until the files are written"):
        gathered(ITEMS[: TEXTS_PER_PART + 1], Doubling(), None)
