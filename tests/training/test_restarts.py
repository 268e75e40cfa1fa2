"""Properties of torchrun's restarts: killed processes resume to the same bytes, and lost ones are named."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from kills import contents, without_timings
from small_runs import SMALL, corpus, run, run_on
from torchrun import torchrun

from adlm.training.run_folder import COMMITS, open_run_folder

WORDS = ("train.steps=14", "train.checkpoint_every=2", "train.valid_every=4", "train.keep=2", "train.threads=1")
NORMAL = {"metrics.jsonl": without_timings, COMMITS: lambda content: b""}

# In the first attempts a process is killed: at the start, while it writes its file, while the checkpoint is published,
# and in any moment of and after a step.
KILLS = """
import os, random, signal, threading
from pathlib import Path
from adlm.training import saving, train

attempt, rank, num = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
rng = random.Random(attempt)
step, seconds, victim = rng.randrange(1, 5), rng.uniform(0, 0.1), 0 if attempt == 3 else rng.randrange(num)


def kill(*values):
    Path(__file__).with_name(f"killed-{attempt}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if rank == victim and attempt == 1:
    kill()
if rank == victim and attempt == 2:
    saving.sync = kill
if rank == victim and attempt == 3:
    saving.write_manifest = kill
if rank == victim and attempt in (0, 4, 5):
    train_step, steps = train.train_step, []

    def counted(*values):
        steps.append(1)
        if len(steps) == step:
            threading.Timer(seconds, kill).start()
        return train_step(*values)

    train.train_step = counted
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"), lines=100)


def command(prepared: Path, out: Path, *words: str) -> tuple[str, ...]:
    return ("train", *SMALL, f"data.prepared={prepared}", *WORDS, *words, "--out", str(out))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("num", [2, 4])
def test_a_run_whose_processes_are_killed_and_restarted_ends_with_the_same_bytes(num, prepared, tmp_path):
    words = ("train.shard=2", "train.optimizer=muon")
    run_on(num, prepared, {"whole": (tmp_path / "whole", (*WORDS, *words))})
    result = torchrun(tmp_path, num, 8, *command(prepared, tmp_path / "run", *words), first=KILLS)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("killed-*"))) >= 4
    assert contents(tmp_path / "run", NORMAL) == contents(tmp_path / "whole", NORMAL)


def test_a_restarted_process_waits_for_the_lock_of_the_run(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ExitStack() as other:
        other.enter_context(open_run_folder(tmp_path))
        timer = threading.Timer(0.5, other.close)
        timer.start()
        assert run(prepared, tmp_path, "train.steps=3").counters.step == 3
        timer.join()


FULL = """
import errno, os
from adlm.training import saving

def full(*values):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

if os.environ["RANK"] == "1":
    saving.write_rows = full
"""

FULL_MODEL = """
import errno, os
from adlm.checkpoints import model_folder
from adlm.checkpoints.tensor_files import file_order

def full(tensors, path, full_tensor):
    full_tensor(tensors[file_order(tensors)[0]])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

model_folder.write_tensors = full
"""

STUCK = """
import os, signal
from datetime import timedelta
from adlm import distributed
from adlm.training import train

distributed.TRAINING_TIMEOUT = timedelta(seconds=10)
train_step, steps = train.train_step, []

def stuck(*values):
    steps.append(1)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        signal.pause()
        os._exit(1)
    return train_step(*values)

train.train_step = stuck
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("num", "words", "first", "error"),
    [
        (
            2,
            (),
            FULL,
            "step-00000002 cannot be written by process 1: No space left on device; make room, then run the same",
        ),
        (2, ("train.shard=2",), FULL_MODEL, "run/model cannot be written: No space left on device; make room, then"),
        (2, (), STUCK, "process 1 of 2 has ended or does not answer (Timed out waiting"),
        (4, (), STUCK, "process 1 of 4 has ended or does not answer (Timed out waiting"),
    ],
)
def test_all_processes_stop_with_one_line_that_names_the_problem(num, words, first, error, prepared, tmp_path):
    result = torchrun(tmp_path, num, 0, *command(prepared, tmp_path / "run", *words), first=first)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("adlm: ")]
    assert len(lines) == 1, result.stderr
    assert error in lines[0]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
