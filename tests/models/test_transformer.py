"""Properties of the single network."""

import math
from dataclasses import replace

import pytest
import torch
from worlds import randomized, seeded

from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.methods import method_of
from adlm.models.layers import apply_rotary, rotary_angles
from adlm.models.transformer import Block, TimeCondition, Transformer, num_parameters

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.fixture
def network(tiny_config):
    return randomized(Transformer(tiny_config.model, 12).double()).eval()


@pytest.fixture
def causal(tiny_config):
    return randomized(Transformer(tiny_config.model, 12, causal=True, modulated=False).double()).eval()


def test_a_causal_network_sees_no_later_token_and_a_bidirectional_one_does(network, causal):
    changed = IDS.clone()
    changed[:, 5] = 0
    for each, blind in ((causal, True), (network, False)):
        before, after = each(IDS)[:, :5], each(changed)[:, :5]
        assert torch.equal(before, after) == blind
        assert not torch.equal(each(IDS)[:, 5:], each(changed)[:, 5:])


def test_padding_changes_nothing_for_the_tokens_before_it(network, causal):
    pad = torch.zeros(2, 8, dtype=torch.bool)
    pad[1, 5:] = True
    for each in (network, causal):
        padded = each(IDS, pad=pad)
        torch.testing.assert_close(padded[1, :5], each(IDS[1:, :5])[0])
        torch.testing.assert_close(padded[0], each(IDS[:1])[0])


def test_a_row_of_nothing_but_padding_stays_finite(network):
    pad = torch.tensor([[False] * 8, [True] * 8])
    assert network(IDS, pad=pad).isfinite().all()


def test_without_sigma_a_network_is_conditioned_on_zero_noise(network):
    assert torch.equal(network(IDS), network(IDS, sigma=None))
    torch.testing.assert_close(network(IDS), network(IDS, sigma=torch.zeros(2).double()))
    noisy = network(IDS, sigma=torch.tensor([0.0, 1.3]).double())
    torch.testing.assert_close(noisy[0], network(IDS)[0])
    assert (noisy[1] - network(IDS)[1]).abs().max() > 1e-3


def test_the_time_embedding_is_128_cosines_then_128_sines_of_falling_frequency():
    condition = TimeCondition(256).double()
    seen = []
    condition.inner.register_forward_hook(lambda module, given, result: seen.append(given[0][0]))
    condition(torch.tensor([1.7]).double())
    frequencies = [10_000 ** (-k / 128) for k in range(128)]
    by_hand = [math.cos(1.7 * f) for f in frequencies] + [math.sin(1.7 * f) for f in frequencies]
    torch.testing.assert_close(seen[0], torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units warns and falls back
def test_a_bfloat16_network_predicts_nearly_the_same(tiny_config):
    network = randomized(Transformer(tiny_config.model, 12)).eval()
    precise = network(IDS, sigma=torch.ones(2)).softmax(dim=-1)
    rounded = network.bfloat16()(IDS, sigma=torch.ones(2)).float().softmax(dim=-1)
    assert (precise - rounded).abs().max() < 0.05


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_with_neighbour_initialization_a_changed_token_affects_its_neighbours_most(tiny_config, heads):
    """Even heads attend to the previous token and odd heads to the next one, whatever the tokens are."""
    model = replace(tiny_config.model, hidden=64, heads=heads, blocks=1, dropout=0.0, start="neighbours")
    torch.manual_seed(0)
    network = Transformer(model, 300).double().eval()
    rows = torch.randint(300, (64, 40), generator=seeded())
    changed = rows.clone()
    changed[:, 20] = torch.randint(300, (64,), generator=seeded(1))
    effect = (network.hidden(changed) - network.hidden(rows)).square().sum(dim=-1).mean(dim=0)
    beside = [21] if heads == 1 else [19, 21]
    elsewhere = [position for position in range(40) if position not in (20, *beside)]
    assert effect[beside].min() > 1.5 * effect[elsewhere].max()


def test_the_initialization_of_blocks_leaves_all_other_weights_unchanged(tiny_config):
    """Embeddings, heads and MLPs are as with start "published"; so is every weight of a network without adaLN."""
    fresh = {}
    for start in ("published", "neighbours"):
        for modulated in (True, False):
            torch.manual_seed(0)
            network = Transformer(replace(tiny_config.model, start=start), 12, modulated=modulated)
            fresh[start, modulated] = network.state_dict()
    changed = {
        name.rpartition("blocks.")[2].partition(".")[2]
        for name, weight in fresh["published", True].items()
        if not torch.equal(weight, fresh["neighbours", True][name])
    }
    assert changed == {"qkv.weight", "modulation.bias"}
    for name, weight in fresh["published", False].items():
        assert torch.equal(weight, fresh["neighbours", False][name])


def test_rotary_attention_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=seeded(), dtype=torch.float64).expand(2, 1, 1, 10, 8)
    angles = rotary_angles(10, 8, like=q)
    scores = (apply_rotary(q, angles) @ apply_rotary(k, angles).transpose(-1, -2))[0, 0]
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0, 1] != scores[0, 2]
    torch.testing.assert_close(apply_rotary(q, angles).norm(dim=-1), q.norm(dim=-1))


def test_normalised_queries_and_keys_do_not_depend_on_their_size(tiny_config):
    """Scaling their weights changes nothing, so attention logits are bounded by the learnt weights of the norm."""
    torch.manual_seed(0)
    plain, normed = (Block(16, 2, None, 0.0, False, qk_norm).double() for qk_norm in (False, True))
    h, angles = torch.randn(2, 8, 16).double(), rotary_angles(8, 8, like=torch.zeros(1).double())
    for block, is_unchanged in ((plain, False), (normed, True)):
        before = block(h, angles, None, None)
        with torch.no_grad():
            block.qkv.weight[:32] *= 3
        assert torch.allclose(block(h, angles, None, None), before, atol=1e-5) == is_unchanged
    q, k, _ = normed.queries_keys_values(h, angles)
    torch.testing.assert_close(q.square().mean(dim=-1), torch.ones(2, 2, 8).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(k.square().mean(dim=-1), torch.ones(2, 2, 8).double(), atol=1e-4, rtol=0)


def test_a_new_network_predicts_uniformly_for_every_input(tiny_config):
    logits = Transformer(tiny_config.model, 12)(IDS)
    assert (logits == 0).all()


def test_dropout_is_for_training_only(tiny_config):
    network = randomized(Transformer(replace(tiny_config.model, dropout=0.5), 12))
    assert not torch.equal(network.train()(IDS), network.train()(IDS))
    assert torch.equal(network.eval()(IDS), network.eval()(IDS))


def test_nats_are_minus_the_log_probability_of_the_target(network):
    weight = torch.rand(2, 8, generator=seeded())
    scored = network.score(IDS, IDS, weight, mask_id=0)
    logits = network(IDS)
    logits[..., 0] = -torch.inf
    expected = -logits.log_softmax(dim=-1).gather(-1, IDS[..., None])[..., 0]
    torch.testing.assert_close(scored.nats, expected)
    torch.testing.assert_close(scored.total, (weight * expected).sum())


@pytest.mark.parametrize(("preset", "millions"), [("owt/adlm", 293.19), ("owt/mdlm", 169.63)])
def test_the_paper_sizes_have_the_paper_number_of_parameters(preset, millions):
    config = replace(resolve([preset]), vocabulary=Vocabulary(50_258, 50_257))
    with torch.device("meta"):
        network = method_of(config).build()
    assert round(num_parameters(network) / 1e6, 2) == millions
