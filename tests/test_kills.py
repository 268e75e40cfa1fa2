"""Commands killed at every file operation resume to the files and bytes of an uninterrupted run.

ADLM_KILLS=1 tests every operation. By default only every n-th one is tested, since each costs two runs.
"""

import os
import shutil
from pathlib import Path

import pytest
from kills import check_kills, without_timings
from small_models import mostly_slow
from small_runs import SMALL, corpus

from adlm.training.run_folder import COMMITS

STRIDE = int(os.environ.get("ADLM_KILLS", "0"))
# The commit of the code is not compared: it changes if a file of the repository is edited during the test.
NORMAL = {"metrics.jsonl": without_timings, COMMITS: lambda content: b""}
SHORT = (
    "train.steps=4",
    "train.checkpoint_every=2",
    "train.valid_every=2",
    "train.keep=1",
    "model.blocks=1",
    "train.threads=1",
)


@pytest.mark.processes
@pytest.mark.parametrize("stride", mostly_slow((223, 23), 223))
def test_training_killed_at_any_file_operation_resumes_to_the_same_files(tmp_path: Path, stride: int) -> None:
    words = ["train", *SMALL, *SHORT, f"data.prepared={corpus(tmp_path, lines=100)}", "train.samples=1"]
    command = [*words, "--out", str(tmp_path / "out" / "run")]
    operations = check_kills(command, tmp_path / "out", NORMAL, STRIDE or stride)
    assert len(operations) > 150


def own_text(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} is a number of the union\n" for number in range(60)))
    return [f"data.path={text}", "data.boundary=line", "tokenizer=bytes", "data.held_out=0.2", "length=16"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stride", [97, 47])
def test_training_that_prepares_its_text_killed_at_any_file_operation_resumes_to_the_same_files(
    tmp_path: Path, stride: int
) -> None:
    words = ["train", *SMALL, *SHORT, "train.steps=3", *own_text(tmp_path), "train.samples=1"]
    command = [*words, "--out", str(tmp_path / "out" / "run")]
    operations = check_kills(command, tmp_path / "out", NORMAL, STRIDE or stride)
    assert len(operations) > 150


@pytest.mark.processes
@pytest.mark.parametrize("replacing", mostly_slow([False, True], True))
def test_prepare_killed_at_any_file_operation_resumes_to_the_same_files(tmp_path: Path, replacing: bool) -> None:
    words, old = own_text(tmp_path), tmp_path / "old"
    if replacing:
        from adlm.cli.main import main

        assert main(["prepare", *words, "--out", str(old)]) == 0

    def set_up() -> None:
        if replacing:
            shutil.copytree(old, tmp_path / "out" / "prepared")

    more = ["data.seed=5", "--out", str(tmp_path / "out" / "prepared")]
    operations = check_kills(["prepare", *words, *more], tmp_path / "out", {}, STRIDE or 13, set_up)
    assert len(operations) > 40
