"""LoRA: what is trained, the merged network, frozen copies of it, and continuing an adapter."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from worlds import randomized, seeded

from adlm.config.schema import Config, Model, Vocabulary
from adlm.inference.frozen import FrozenCopy
from adlm.methods import method_of
from adlm.models.heads import linear_cross_entropy
from adlm.models.lora import LowRankLinear, add_lora, merge, start_from_adapter, trained_parameters

V, MASK, RANK, SCALE = 11, 10, 3, 0.7
MODEL = Model(hidden=16, heads=2, blocks=2, condition=8, dropout=0.0, bridge="hidden")
LLAMA = Model(family="llama", hidden=16, heads=4, kv_heads=2, mlp=24, blocks=2, dropout=0.0, bridge="none")
TIED = replace(LLAMA, tie_embedding=True, qkv_bias=True)
CASES = [
    *((method, MODEL) for method in ("adlm", "mdlm", "ar", "a2r")),
    *((method, model) for method in ("adlm", "ar") for model in (LLAMA, TIED)),
]
IDS = [f"{method}-{model.family}{'-tied' * model.tie_embedding}" for method, model in CASES]
each_network = pytest.mark.parametrize(("method", "model"), CASES, ids=IDS)


def config_of(method="mdlm", model=MODEL):
    return Config(method=method, vocabulary=Vocabulary(V, MASK), length=6, model=model)


def network_of(config):
    """In float64, with every weight random."""
    return randomized(method_of(config).build().double())


def with_lora(network, rank=RANK, norms=False):
    """LoRA whose factors have been trained: all of them random."""
    add_lora(network, rank, SCALE, MASK, norms)
    torch.manual_seed(3)
    for weight in trained_parameters(network).values():
        nn.init.normal_(weight, std=0.3)
    return network


def detached(network):
    return {name: weight.detach().clone() for name, weight in trained_parameters(network).items()}


def ids():
    return torch.randint(V, (3, 6), generator=seeded(4))


@pytest.mark.parametrize("norms", [False, True])
@each_network
def test_the_merged_network_is_the_one_with_lora(method, model, norms):
    config = config_of(method, model)
    base = network_of(config)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    adapted, z = with_lora(base, norms=norms), ids()
    merged = method_of(config).build().double()
    before = merged.load_state_dict(weights) and merged(z)
    merged.load_state_dict(merge(weights, detached(adapted), SCALE, MASK))
    torch.testing.assert_close(merged(z), adapted(z), rtol=0, atol=1e-12)
    assert (adapted(z) - before).abs().max() > 0.1, "the adapter changes the function"


@each_network
def test_a_frozen_copy_has_the_merged_weights_and_follows_them(method, model):
    adapted, z, copies = with_lora(network_of(config_of(method, model))).eval(), ids(), FrozenCopy()
    for _ in range(2):
        frozen = copies.get(adapted)
        hidden = frozen.hidden(z).last
        torch.testing.assert_close(frozen.logits(hidden.flatten(0, 1)).view(3, 6, V), adapted(z), rtol=0, atol=1e-10)
        with torch.no_grad():
            for weight in trained_parameters(adapted).values():
                weight.mul_(1.1)  # as an optimizer step would


def test_lora_starts_as_the_network_and_trains_only_what_it_adds():
    network, z = network_of(config_of("adlm")), ids()
    logits, plain = network(z), {name for name, _ in network.named_parameters()}
    add_lora(network, RANK, SCALE, MASK)
    torch.testing.assert_close(network(z), logits, rtol=0, atol=0)
    names = set(trained_parameters(network))
    assert names & plain == {"denoiser.bridge.weight", "denoiser.bridge.bias"}
    added = {name.rpartition(".")[2] for name in names - plain}
    assert added == {"lora_a", "lora_b", "trained_row"}
    linear = [name for name, layer in network.named_modules() if isinstance(layer, LowRankLinear)]
    assert len(linear) == 5 * 3, "qkv, out, widen, narrow and modulation of 2 + 1 blocks"
    network(z).sum().backward()
    assert {name for name, weight in network.named_parameters() if weight.grad is not None} == names


def test_at_full_rank_it_reaches_any_weights():
    """The function class contains full fine-tuning: A the identity, B the difference of the matrices."""
    config = config_of("ar")
    base, target = network_of(config), randomized(method_of(config).build().double(), seed=9)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if ".blocks." in name and name.endswith("bias"):  # biases stay frozen
                weight.copy_(base.get_parameter(name))
    wanted, adapter = target.state_dict(), {}
    add_lora(base, 64, 1.0, MASK, norms=True)
    for name, weight in trained_parameters(base).items():
        layer, _, part = name.rpartition(".")
        if part == "lora_a":
            adapter[name] = torch.eye(64, weight.shape[1], dtype=torch.float64)
        elif part == "lora_b":
            difference = wanted[f"{layer}.weight"] - base.get_parameter(f"{layer}.frozen")
            adapter[name] = nn.functional.pad(difference, (0, 64 - difference.shape[1]))
        elif part == "trained_row":
            adapter[name] = wanted[f"{layer}.weight"][MASK]
        else:
            adapter[name] = wanted[name]
    start_from_adapter(base, adapter, 1.0)
    z = torch.full((1, 6), MASK)  # of the embedding, only the mask's row is trained
    torch.testing.assert_close(base.hidden(z), target.hidden(z), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [RANK, RANK + 2])
def test_an_adapter_continues_with_the_same_function_at_its_rank_or_a_higher_one(rank):
    config, z = config_of("adlm"), ids()
    first = with_lora(network_of(config))
    second = network_of(config)
    add_lora(second, rank, 2.0, MASK)
    start_from_adapter(second, detached(first), SCALE)
    torch.testing.assert_close(second(z), first(z), rtol=0, atol=1e-12)


def test_a_frozen_head_has_no_gradient_and_the_same_gradient_of_the_hidden_states():
    generator = seeded(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (V, 4), (V,))
    )
    targets, ones = torch.arange(5), torch.ones(5, dtype=torch.float64)
    gradients = []
    for trained in (True, False):
        inputs = [hidden.clone().requires_grad_(True)]
        inputs += [each.clone().requires_grad_(trained) for each in (weight, bias)]
        linear_cross_entropy(*inputs, targets, ones, MASK, rows=2).total.backward()
        gradients.append(inputs[0].grad)
        assert (inputs[1].grad is not None) == (inputs[2].grad is not None) == trained
    assert torch.equal(*gradients)
