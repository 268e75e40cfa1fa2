"""Laws of the processes that torchrun started: each has the device that is its own."""

import pytest
import torch

from adlm import distributed as processes
from adlm.distributed import local_device


@pytest.mark.parametrize(
    ("name", "local_rank", "wanted", "current"),
    [
        ("cpu", None, "cpu", []),
        ("cpu", "1", "cpu", []),
        ("cuda", None, "cuda", []),  # torch refuses to be set to a GPU without a number
        ("cuda", "1", "cuda:1", ["cuda:1"]),
        ("cuda:2", None, "cuda:2", ["cuda:2"]),
        ("cuda:2", "1", "cuda:2", ["cuda:2"]),
    ],
)
def test_a_process_has_the_gpu_of_its_number_unless_one_is_named(name, local_rank, wanted, current, monkeypatch):
    made_current = []
    monkeypatch.setattr(processes, "device_of", torch.device)  # there may be no GPU here
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(str(device)))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(local_device(name)) == wanted
    assert made_current == current
