"""How networks are initialized: as `method.build()` does, one block at a time."""

import pytest
import torch

from adlm.config.load import resolve
from adlm.diffusion.times import BatchRng
from adlm.distributed import Processes
from adlm.methods import method_of
from adlm.models.anchored import start_from_unigram
from adlm.registry import METHODS
from adlm.training import build
from adlm.training.build import build_train_state
from adlm.training.metrics import count_flops, training_flops
from adlm.training.sharding import blocks_of
from adlm.training.step import seed_of

PROCESSES = Processes(0, 1, torch.device("cpu"), None)
SMALL = ["vocabulary.size=24", "vocabulary.mask_id=23", "length=16", "model.hidden=32", "model.heads=2"]
SMALL += ["model.condition=8", "schedule.eps=1e-3", "train.compile=off"]
VARIANTS = {
    **{name: [f"method={name}"] for name in METHODS},
    "d3pm": ["method=d3pm", "time.steps=8"],
    "neighbours": ["method=adlm", "model.start=neighbours", "model.bridge_start=identity"],
    "early head": ["method=adlm", "model.second_anchor_head=1", "model.tie_embedding=true"],
    "rates": ["method=mdlm", "rates.rule=text", "rates.blocks=2", "time.masks=counted", "schedule.eps=0"],
    "blocks": ["method=adlm", "model.block_length=4", "model.chain=8"],
    "llama": ["method=ar", "model.family=llama", "model.kv_heads=1"],
    "gpt2": ["method=mdlm", "model.family=gpt2", "model.positions=16"],
    "float64": ["method=adlm", "train.precision=float64"],
}


def method_with(*words):
    return method_of(resolve([*SMALL, "model.blocks=3", *words]))


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_a_network_starts_bit_equal_to_one_built_as_a_whole(words):
    method, frequencies = method_with(*words), torch.linspace(-3, -1, 24).log_softmax(0)
    torch.manual_seed(seed_of(method.config.train.seed, "weights"))
    whole = method.build()
    start_from_unigram(whole, frequencies)
    if method.config.train.precision == "float64":
        whole = whole.double()
    expected = whole.state_dict()
    state = build_train_state(method, PROCESSES, pytest.fail, frequencies)
    found = state.network.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(state.ema.weights[name], value) for name, value in whole.named_parameters())


def test_the_host_holds_one_block_at_a_time(monkeypatch):
    """Of the initial weights, which are copied to the network on its device."""
    copied, copy = [], build._copy_weights

    def watched(module, source):
        assert all(weight.is_meta for block in copied for weight in block.parameters())
        copied.append(source)
        copy(module, source)

    monkeypatch.setattr(build, "_copy_weights", watched)
    build_train_state(method_with("method=adlm"), PROCESSES, pytest.fail)
    assert len(copied) == 3 + 1 + 1  # the blocks of both networks, then what is in none


@pytest.mark.parametrize("name", ["ar", "mdlm", "adlm"])
def test_the_work_of_a_step_is_known_from_the_shapes(name):
    """As torch counts it on a CPU, where it leaves attention out."""
    method = method_with(f"method={name}", "model.hidden=64", "model.bridge=hidden", "anchor.rule=all")
    x = torch.randint(23, (8, 16))
    network = method.build()

    def step():
        method.loss(network, x, None, 1.0, BatchRng(torch.Generator().manual_seed(0))).total.backward()

    counted = count_flops(step) / int(method.predicted(x, None).sum())
    attention = 14 * len(blocks_of(network)) * 16 * 64
    assert training_flops(method, network) == pytest.approx(counted + attention, rel=1e-9 if name == "ar" else 0.03)
