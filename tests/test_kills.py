"""Commands killed at every file operation resume to the files and bytes of an uninterrupted run."""

import os
from pathlib import Path

import pytest
from kills import check_kills, without_clocks
from small_runs import SMALL, corpus

# Every operation: ADLM_KILLS=1. The suite takes every so many-th, since each costs two starts.
STRIDE = int(os.environ.get("ADLM_KILLS", "0"))


@pytest.mark.processes
def test_training_killed_at_any_file_operation_resumes_to_the_same_files(tmp_path: Path) -> None:
    knobs = ("train.steps=4", "train.snapshot_every=2", "train.valid_every=2", "train.keep=1", "model.blocks=1")
    words = ["train", *SMALL, *knobs, f"data.prepared={corpus(tmp_path, lines=100)}", "train.samples=1"]
    normal = {"metrics.jsonl": without_clocks}
    operations = check_kills([*words, "--out", str(tmp_path / "out" / "run")], tmp_path / "out", normal, STRIDE or 17)
    assert len(operations) > 60
