"""Requests that cannot fit in memory are user errors before work starts; the bounds are never too high."""

import os
from dataclasses import replace

import pytest
import torch
from small_runs import corpus, run

from adlm import limits
from adlm.config.load import resolve
from adlm.config.schema import Config, Model, Schedule, Time, Train, Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.models.transformer import num_parameters

CPU = torch.device("cpu")


def config_of(method="adlm", length=8, size=12, train=None, **sizes) -> Config:
    return Config(
        method=method,
        vocabulary=Vocabulary(size, 7),
        length=length,
        model=Model(**{"hidden": 16, "heads": 2, "blocks": 3, "condition": 8, **sizes}),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=10 if method == "d3pm" else 0),
        train=train or Train(),
    )


@pytest.fixture
def eight_gigabytes(monkeypatch):
    monkeypatch.setattr(limits, "memory_of", lambda device: 8 * 10**9)


def test_a_network_with_a_second_anchor_head_is_counted():
    config = config_of("adlm", blocks=2, second_anchor_head=1)
    assert limits.check_network(config, CPU) == 4 * num_parameters(method_of(config).build())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(hidden=10**6, heads=4, denoiser_blocks=0),
            "the weights of model.hidden 1000000, model.blocks 3, model.condition 8 and a vocabulary of 12 symbols: at "
            "least 144 TB of memory, and this machine has 8 GB; lower one of them",
        ),
        (config_of(condition=10**6), "model.condition 1000000 .* at least 8 TB of memory"),
        (config_of(hidden=2048, blocks=24), "EMA and moments of .* parameters: at least .* with train.shard"),
        (
            config_of(train=Train(batch_size=10**9)),
            "1000000000 sequences .* lower train.batch_size, or set train",
        ),
        (config_of(train=Train(micro_batch=10**9)), "1000000000 sequences of 8 tokens at once: .*; lower train.micro"),
        (config_of(train=Train(batch_size=10**9, micro_batch=1)), "one batch of train.batch_size 1000000000 sequences"),
        (config_of(size=50_258, length=1024, train=Train(samples=500)), "train.samples 500 texts of 1024 tokens"),
        (config_of(length=2**24), "of 16777216 tokens"),
    ],
)
def test_training_that_cannot_fit_is_a_user_error(config, message, eight_gigabytes):
    with pytest.raises(UserError, match=message):
        limits.check_training(config, CPU)


@pytest.mark.usefixtures("eight_gigabytes")
def test_training_that_fits_by_sharding_recomputation_or_several_processes_is_accepted():
    limits.check_training(resolve(["owt/adlm", "vocabulary.size=50258", "vocabulary.mask_id=50257"]), CPU, num_ranks=64)
    large = config_of(hidden=2048, blocks=16, denoiser_blocks=0, train=Train(batch_size=8, ema=0.0))
    with pytest.raises(UserError, match="and moments"):
        limits.check_training(large, CPU)
    limits.check_training(replace(large, train=replace(large.train, shard=8)), CPU, num_ranks=8)
    weights_of_13_gigabytes = config_of(hidden=8192, blocks=4, denoiser_blocks=0, train=Train(batch_size=64, shard=64))
    limits.check_training(weights_of_13_gigabytes, CPU, num_ranks=64)
    long = config_of(length=1024, hidden=1024, blocks=8, train=Train(batch_size=128, recompute=True))
    limits.check_training(long, CPU)
    with pytest.raises(UserError, match="--batch"):
        limits.check_training(replace(long, train=replace(long.train, recompute=False)), CPU, batch_option="--batch")


@pytest.mark.usefixtures("eight_gigabytes")
def test_sampling_that_cannot_fit_is_a_user_error():
    config = config_of(length=1024)
    limits.check_sampling(config, 64, 1024, CPU)
    limits.check_sampling(config, 100_000, 1024, CPU, rows_at_once=32)
    for rows, length, at_once in ((10**11, 1024, None), (1, 10**11, None), (10**9, 8, 32), (10**6, 1024, None)):
        with pytest.raises(UserError, match=f"--batch {rows} of length {length}: at least .* this machine has 8 GB"):
            limits.check_sampling(config, rows, length, CPU, "--batch", at_once)


def test_the_memory_of_the_machine_is_at_most_its_physical_memory():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**28 < limits.memory_of(CPU) <= pages


def test_the_memory_limit_of_a_container_is_respected(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("123456789\n")
    monkeypatch.setattr(limits, "CGROUP_LIMITS", (tmp_path / "max", tmp_path / "limit", tmp_path / "absent"))
    assert limits.memory_of.__wrapped__(CPU) == 123456789


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(999, "999 bytes"), (1536, "1.54 kB"), (48_120_000_000_000, "48.1 TB"), (10**24, "1,000,000,000 PB")],
)
def test_bytes_are_formatted_with_units(num_bytes, text):
    assert limits.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.hidden=1000000", "at least 96 TB of memory"),
        ("train.batch_size=1000000000", "a training step with 1000000000 sequences"),
    ],
)
def test_a_run_that_cannot_fit_is_a_user_error_at_once_and_writes_no_config(option, message, tmp_path, eight_gigabytes):
    prepared = corpus(tmp_path, lines=50)
    with pytest.raises(UserError, match=message):
        run(prepared, tmp_path / "run", "method=mdlm", option)
    assert not (tmp_path / "run" / "config.yaml").exists()
