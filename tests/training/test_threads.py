"""Properties of the number of CPU threads: the number of idle CPUs by default, and constant over a run."""

import pytest
import torch
from small_runs import corpus, run

from adlm import distributed
from adlm.config.load import load_config


@pytest.fixture
def all_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(distributed, "MAX_THREADS", 8)


@pytest.mark.parametrize(("idle", "threads"), [(0.1, 1), (1.2, 1), (2.8, 3), (7.9, 8), (30.0, 8)])
def test_there_are_as_many_threads_as_idle_cpus_and_at_least_one(idle, threads, all_threads, monkeypatch):
    monkeypatch.setattr(distributed, "idle_cpus", lambda: idle)
    assert distributed.default_threads() == threads


def test_omp_num_threads_overrides_the_idle_cpus(all_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(distributed, "idle_cpus", lambda: 1.0)
    assert distributed.default_threads() == 8


def test_cpus_are_counted_as_idle_by_the_share_of_their_time(monkeypatch):
    times = iter([{0: (100, 200), 1: (50, 200)}, {0: (190, 300), 1: (50, 300)}])
    monkeypatch.setattr(distributed, "_cpu_times", lambda: next(times))
    assert distributed.idle_cpus(0) == pytest.approx(0.9)


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, monkeypatch):
    prepared, out, before = corpus(tmp_path, lines=100), tmp_path / "run", torch.get_num_threads()
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr("adlm.training.train.default_threads", lambda: 2)
    run(prepared, out, "train.steps=3")
    monkeypatch.setattr("adlm.training.train.default_threads", lambda: 1)
    run(prepared, out, "train.steps=4")
    run(prepared, out, "train.steps=5", "train.threads=1")
    run(prepared, out, "train.steps=6")
    assert used == [2, 2, 1, 1]
    assert load_config(out / "config.yaml").train.threads == 1
    assert torch.get_num_threads() == before
