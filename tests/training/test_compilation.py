"""Properties of compilation: the same numbers if it works, one message if it does not."""

from dataclasses import replace

import pytest
import torch
from torch._inductor import config as inductor
from worlds import batch_rng, randomized, seeded

from adlm.config.schema import Schedule
from adlm.methods import method_of
from adlm.models.heads import why_no_triton
from adlm.models.layers import rotary_angles
from adlm.training import build
from adlm.training.build import compile_trunks, recompute_blocks, why_not_compile
from adlm.training.step import MicroBatch, new_train_state, train_step

needs_cpp = pytest.mark.skipif(bool(build.why_no_cpp()), reason="no C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_cpp])]


def test_without_a_compiler_the_network_is_unchanged_and_a_message_says_why(tiny_config):
    network = method_of(tiny_config).build()
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "no C++ compiler (no-such-compiler)" in compile_trunks(network)
    assert not any("finish" in vars(module) or module._compiled_call_impl for module in network.modules())
    network(torch.zeros(1, 8, dtype=torch.int64))


def test_a_failing_compiler_is_detected_on_a_small_function(monkeypatch):
    def failing(function):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(build, "why_no_cpp", lambda: "")
    monkeypatch.setattr("torch.compile", failing)
    assert "failed on a small function (RuntimeError)" in why_not_compile(torch.device("cpu"))


def test_triton_needs_a_c_compiler(monkeypatch):
    why_no_triton.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CC", "no-such-compiler")
    try:
        assert "no C compiler (no-such-compiler)" in build.why_not_compile(torch.device("cuda"))
    finally:
        why_no_triton.cache_clear()


@pytest.mark.parametrize(("device", "wanted", "threads"), [("cuda", None, 1), ("cuda", "8", 4), ("cpu", None, 4)])
def test_on_a_gpu_no_workers_are_started_unless_they_are_wanted(tiny_config, monkeypatch, device, wanted, threads):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if wanted:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", wanted)
    monkeypatch.setattr(build, "why_not_compile", lambda device: "no compiler")
    with inductor.patch({"compile_threads": 4}):
        assert "no compiler" in compile_trunks(method_of(tiny_config).build(), device=torch.device(device))
        assert inductor.compile_threads == threads


@pytest.mark.filterwarnings("ignore")
def test_a_network_compiles_to_two_graphs_with_the_same_results(tiny_config):
    """One graph for all blocks, one for the final layers. The eager backend generates no code."""
    network = randomized(method_of(tiny_config).build().double()).eval()
    ids = torch.randint(7, (2, 8), generator=seeded())
    expected = network(ids)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of graphs that other tests compiled
    assert compile_trunks(network, backend="eager") == ""
    torch.testing.assert_close(network(ids), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_hidden_states_for_alignment_are_kept_without_another_graph(tiny_config):
    train, model = replace(tiny_config.train, align_weight=1.0), replace(tiny_config.model, block_length=3)
    method = method_of(replace(tiny_config, method="mdlm", train=train, model=model))
    network = randomized(method.build().double()).eval()
    x = torch.randint(7, (4, 8), generator=seeded())
    expected = method.loss(network, x, None, 0.5, batch_rng(1))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert compile_trunks(network, backend="eager") == ""
    loss = method.loss(network, x, None, 0.5, batch_rng(1))
    torch.testing.assert_close(loss.total, expected.total)
    assert float(loss.parts["align"]) == pytest.approx(float(expected.parts["align"]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputed_blocks_compile_to_one_graph_with_the_same_gradients(mdlm_config, backend):
    """Including dropout: a block is recomputed with the masks of its forward pass."""
    method = method_of(replace(mdlm_config, model=replace(mdlm_config.model, dropout=0.2)))
    x = torch.randint(7, (6, 8), generator=seeded())
    results = []
    for recomputed in (False, True):
        network = randomized(method.build().double()).train()
        if recomputed:
            recompute_blocks(network)
            torch._dynamo.reset()
            assert compile_trunks(network, backend) == ""
            torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        loss = method.loss(network, x, None, 0.5, batch_rng(1))
        loss.mean.backward()
        results.append([loss.mean.detach(), *(weight.grad for weight in network.parameters())])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow), BACKENDS[1]])
def test_a_recomputed_block_stores_its_input_only(mdlm_config, backend):
    """No activations, and no copies of the weights in bfloat16."""
    h = torch.randn(4, 8, 16, generator=seeded(), requires_grad=True)
    angles, condition = rotary_angles(8, 8, like=h), torch.randn(1, 8, generator=seeded())
    stored = {}
    for recomputed in (False, True):
        network = randomized(method_of(replace(mdlm_config, model=replace(mdlm_config.model, dropout=0.2))).build())
        if recomputed:
            recompute_blocks(network)
        if backend is not None:
            torch._dynamo.reset()
            compile_trunks(network.train(), backend)
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda value, kept=kept: kept.append(value), lambda _: None)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            network.trunk.blocks[0](h, angles, condition, None)
        weights = {weight.data_ptr() for weight in network.parameters()}
        activations = [value for value in kept if value.is_floating_point() and value.numel() >= h.numel()]
        stored[recomputed] = {value.data_ptr() for value in activations} - weights
    torch._dynamo.reset()
    assert stored[True] == {h.data_ptr()}
    assert len(stored[False]) > 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_bfloat16_step_with_recomputed_blocks_equals_one_without(mdlm_config, compiled):
    """Of a size that cuDNN's attention takes, and with dropout."""
    model = replace(mdlm_config.model, hidden=128, dropout=0.2)
    method = method_of(replace(mdlm_config, length=128, model=model))
    x = torch.randint(7, (4, 128), generator=seeded())
    gradients = []
    for recomputed in (False, True):
        network = randomized(method.build(), scale=0.05).cuda().train()
        if recomputed:
            recompute_blocks(network)
        torch._dynamo.reset()
        assert not compiled or compile_trunks(network) == ""
        state = new_train_state(method, network, torch.bfloat16)
        torch.manual_seed(0)
        train_step(state, [MicroBatch(x)], x.numel(), 0.5, seeded()).check()
        gradients.append(torch.cat([weight.grad.flatten() for weight in network.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adlm", "sedd", "ar"])  # one condition per batch, one per row, none
def test_on_a_gpu_compiled_loss_and_gradients_equal_eager_ones(tiny_config, name):
    """Including dropout: a seed gives the same masks."""
    model = replace(tiny_config.model, dropout=0.2)
    method = method_of(replace(tiny_config, method=name, schedule=Schedule(eps=1e-3), model=model))
    x = torch.randint(7, (6, 8), generator=seeded()).cuda()
    results = []
    for compiled in (False, True):
        network = randomized(method.build()).cuda().train()
        if compiled:
            assert compile_trunks(network) == ""
        torch.manual_seed(0)
        loss = method.loss(network, x, None, 0.5, batch_rng(1))
        loss.mean.backward()
        results.append([loss.mean.detach(), *(weight.grad for weight in network.parameters())])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4 * float(eager.abs().max()) + 1e-6)
