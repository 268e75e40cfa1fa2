"""Laws of compiling: the same numbers where it works, one sentence where it cannot."""

from dataclasses import replace

import pytest
import torch
from worlds import seeded, wake

from adlm.config.schema import Schedule
from adlm.methods import method_of
from adlm.models import logit_gradients as slopes
from adlm.training import compilation as compiling
from adlm.training.compilation import compile_trunks, why_not_compile


def test_without_a_compiler_the_network_stays_as_it_is_and_one_sentence_says_why(tiny_config, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    network = method_of(tiny_config).build()
    assert "no C++ compiler (no-such-compiler)" in compile_trunks(network)
    assert not any("finish" in vars(module) or module._compiled_call_impl for module in network.modules())
    network(torch.zeros(1, 8, dtype=torch.int64))


def test_a_compiler_that_fails_is_found_out_on_something_small(monkeypatch):
    def failing(function):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiling, "_why_no_cpp", lambda: "")
    monkeypatch.setattr("torch.compile", failing)
    assert "failed on something small (RuntimeError)" in why_not_compile(torch.device("cpu"))


def test_triton_needs_a_c_compiler(monkeypatch):
    slopes.why_no_triton.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CC", "no-such-compiler")
    try:
        assert "no C compiler (no-such-compiler)" in compiling.why_not_compile(torch.device("cuda"))
    finally:
        slopes.why_no_triton.cache_clear()


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_is_two_graphs_and_their_answers_stay(tiny_config):
    """A block, of which all are alike, and what follows the last. By the compiler's front end: no code is built."""
    network = wake(method_of(tiny_config).build().double()).eval()
    ids = torch.randint(7, (2, 8), generator=seeded())
    expected = network(ids)
    torch._dynamo.reset()
    assert compile_trunks(network, backend="eager") == ""
    torch.testing.assert_close(network(ids), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adlm", "sedd", "ar"])  # one condition for all, one a row, none
def test_compiled_on_a_gpu_the_loss_and_gradients_are_those_of_eager(tiny_config, name):
    """Dropout too: its masks come from the same numbers."""
    model = replace(tiny_config.model, dropout=0.2)
    method = method_of(replace(tiny_config, method=name, schedule=Schedule(eps=1e-3), model=model))
    x = torch.randint(7, (6, 8), generator=seeded()).cuda()
    results = []
    for compiled in (False, True):
        network = wake(method.build()).cuda().train()
        if compiled:
            assert compile_trunks(network) == ""
        torch.manual_seed(0)
        loss = method.loss(network, x, None, 0.5, seeded(1))
        loss.mean.backward()
        results.append([loss.mean.detach(), *(weight.grad for weight in network.parameters())])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4 * float(eager.abs().max()) + 1e-6)
