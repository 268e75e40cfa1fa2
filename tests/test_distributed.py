"""Properties of processes started by torchrun: each uses its own device."""

import pytest
import torch

from adlm import distributed
from adlm.distributed import local_device


@pytest.mark.parametrize(
    ("name", "local_rank", "expected", "current"),
    [
        ("cpu", None, "cpu", []),
        ("cpu", "1", "cpu", []),
        ("cuda", None, "cuda", []),  # set_device needs an index
        ("cuda", "1", "cuda:1", ["cuda:1"]),
        ("cuda:2", None, "cuda:2", ["cuda:2"]),
        ("cuda:2", "1", "cuda:2", ["cuda:2"]),
    ],
)
def test_a_process_uses_the_gpu_of_its_local_rank_unless_one_is_named(name, local_rank, expected, current, monkeypatch):
    made_current = []
    monkeypatch.setattr(distributed, "device_of", lambda name, option="": torch.device(name))  # there may be no GPU
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(str(device)))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(local_device(name)) == expected
    assert made_current == current
