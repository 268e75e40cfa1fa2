"""Properties of the anchored pair of networks."""

import copy
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from worlds import randomized, seeded

from adlm.config.schema import Model, Train
from adlm.errors import UserError
from adlm.models import bridges
from adlm.models.anchored import AnchoredTransformer, start_from_unigram
from adlm.models.bridges import LogitsBridge, MixtureBridge
from adlm.models.transformer import num_parameters
from adlm.training.optimizer import build_optimizer

MODEL = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
READING_ANCHORS_ONLY = ("logits", "hidden", "mixture")
BRIDGES = (*READING_ANCHORS_ONLY, "hidden-plus-input", "none")


STARTS = ("random", "identity")


def pair(bridge: str = "logits", **options: object) -> AnchoredTransformer:
    network = AnchoredTransformer(replace(MODEL, bridge=bridge, **options), 12).double()
    return randomized(network).eval()


def gradients(value, network):
    network.zero_grad()
    value.backward()
    return {
        name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None
    }


def test_the_folded_bridge_equals_the_two_layers_gradients_too():
    torch.manual_seed(0)
    head, bridge = torch.nn.Linear(5, 40).double(), LogitsBridge(40, 5).double()
    hidden = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(2, 3, 5, dtype=torch.float64)
    results = []
    for form in (bridge, bridge.unfolded):
        out = form(hidden, head)
        leaves = (hidden, head.weight, head.bias, bridge.weight, bridge.bias)
        results.append([out, *torch.autograd.grad((out * pull).sum(), leaves)])
    for folded, plain in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-12, atol=1e-12)


def test_the_mixture_bridge_is_the_expected_embedding_in_chunks_too(monkeypatch):
    torch.manual_seed(0)
    head, bridge = torch.nn.Linear(5, 40).double(), MixtureBridge(40, 6).double()
    hidden = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    plain = head(hidden).softmax(dim=-1) @ bridge.table
    leaves = (hidden, head.weight, head.bias, bridge.table)
    expected = [plain, *torch.autograd.grad((plain**2).sum(), leaves)]
    monkeypatch.setattr(bridges, "MAX_LOGITS", 3 * 40)
    chunked = bridge(hidden, head)
    for ours, oracle in zip([chunked, *torch.autograd.grad((chunked**2).sum(), leaves)], expected, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bridge", READING_ANCHORS_ONLY)
def test_the_denoiser_reads_the_text_through_the_anchor_network_alone(bridge):
    """With the anchor network's hidden states zeroed, the denoiser's logits are the same for every text."""
    network = pair(bridge)
    assert not torch.equal(network(IDS)[0], network(IDS)[1])
    network.anchor.trunk.norm.weight.data.zero_()
    torch.testing.assert_close(network(IDS)[0], network(IDS)[1])


def test_with_the_input_added_the_denoiser_also_reads_the_text_itself():
    network = pair("hidden-plus-input")
    hidden, bridge = network.anchor.hidden(IDS), network.denoiser.bridge
    added = torch.nn.functional.linear(hidden, bridge.weight, bridge.bias) + network.anchor.embedding.weight[IDS]
    torch.testing.assert_close(network(IDS), network.denoiser.head(network.denoiser.trunk(added)))
    network.anchor.trunk.norm.weight.data.zero_()
    assert not torch.allclose(network(IDS)[0], network(IDS)[1])


@pytest.mark.parametrize("bridge", READING_ANCHORS_ONLY)
def test_the_pair_composes_anchor_network_bridge_and_denoiser(bridge):
    network = pair(bridge)
    hidden = network.anchor.hidden(IDS)
    by_hand = network.denoiser.head(network.denoiser.trunk(network.denoiser.bridge(hidden, network.anchor.head)))
    torch.testing.assert_close(network(IDS), by_hand)
    torch.testing.assert_close(network.anchor_logits(IDS), network.anchor.head(hidden))


@pytest.mark.parametrize("bridge", BRIDGES)
def test_both_totals_and_all_gradients_equal_the_unfolded_unchunked_form(bridge):
    network, x = pair(bridge), IDS.clone()
    z = IDS.masked_fill(torch.rand(2, 8, generator=seeded(1)) < 0.6, 0)
    weight = torch.rand(2, 8, generator=seeded(2)).double() * (z == 0)
    anchor_weight = torch.rand(2, 8, generator=seeded(3)).double()
    scored, anchor_scored = network.score(z, x, weight, anchor_weight, mask_id=0)
    ours = gradients(scored.total + 0.3 * anchor_scored.total, network)
    plain, anchor_plain = network.plain_score(z, x, weight, anchor_weight, mask_id=0)
    oracle = gradients(plain.total + 0.3 * anchor_plain.total, network)
    for fast, slow in ((scored, plain), (anchor_scored, anchor_plain)):
        torch.testing.assert_close(fast.total, slow.total)
        torch.testing.assert_close(fast.nats, slow.nats)
    assert ours.keys() == oracle.keys() == dict(network.named_parameters()).keys()
    for name in ours:
        torch.testing.assert_close(ours[name], oracle[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bridge", BRIDGES)
def test_tied_heads_are_a_pair_whose_heads_have_equal_weights(bridge):
    """The same nats as the untied pair, and the gradient of the one matrix is the sum over both of its uses."""
    tied, untied = pair(bridge, tie_heads=True), pair(bridge)
    untied.load_state_dict({**tied.state_dict(), "denoiser.head.weight": tied.anchor.head.weight})
    assert not torch.equal(tied.anchor.head.bias, tied.denoiser.head.bias)
    weight, results = torch.linspace(0, 1, 8).double().expand(2, 8), []
    for network in (tied, untied):
        scored, anchor_scored = network.score(IDS, IDS, weight, weight, mask_id=0)
        results.append((network(IDS), gradients(scored.total + 0.3 * anchor_scored.total, network)))
    (logits, ours), (expected_logits, expected) = results
    torch.testing.assert_close(logits, expected_logits)
    expected["anchor.head.weight"] += expected.pop("denoiser.head.weight")
    torch.testing.assert_close(ours, expected)


def test_a_tied_matrix_is_one_parameter_with_one_place_in_the_optimizer():
    tied, untied = pair("hidden", tie_heads=True), pair("hidden")
    assert num_parameters(untied) - num_parameters(tied) == tied.anchor.head.weight.numel()
    assert untied.state_dict().keys() - tied.state_dict().keys() == {"denoiser.head.weight"}
    listed = [weight for group in build_optimizer(tied, Train()).param_groups for weight in group["params"]]
    assert sum(weight is tied.anchor.head.weight for weight in listed) == 1
    copied = copy.deepcopy(tied)
    assert copied.denoiser.head.weight is copied.anchor.head.weight is not tied.anchor.head.weight


def test_tied_heads_keep_their_own_biases_which_both_start_at_the_unigram_frequencies():
    network, frequencies = pair("hidden", tie_heads=True), torch.linspace(-3, -1, 12).double().log_softmax(0)
    start_from_unigram(network, frequencies)
    for head in (network.anchor.head, network.denoiser.head):
        torch.testing.assert_close(head.bias.log_softmax(0).detach(), frequencies)
    assert network.denoiser.head.bias is not network.anchor.head.bias


def test_a_start_at_the_unigram_frequencies_leaves_the_output_of_the_logits_bridge_unchanged():
    network, hidden = pair(), torch.randn(2, 8, MODEL.hidden, generator=seeded()).double()
    network.anchor.head.bias.data.zero_()
    before = network.denoiser.bridge(hidden, network.anchor.head)
    start_from_unigram(network, torch.linspace(-3, -1, 12).double().log_softmax(0))
    assert network.anchor.head.bias.any()
    torch.testing.assert_close(network.denoiser.bridge(hidden, network.anchor.head), before)


@pytest.mark.parametrize("bridge", ["hidden", "hidden-plus-input", "logits"])
def test_a_bridge_that_starts_as_the_identity_passes_the_hidden_states_on(bridge):
    networks = [AnchoredTransformer(replace(MODEL, bridge=bridge, bridge_start=start), 99) for start in STARTS]
    hidden = torch.randn(2, 8, MODEL.hidden, generator=seeded())
    random, identity = (network.denoiser.bridge(hidden, network.anchor.head) for network in networks)
    torch.testing.assert_close(identity, hidden, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(random, hidden, rtol=0.1, atol=0.1)


def test_a_second_anchor_head_adds_its_loss_and_changes_nothing_else():
    """It is the head of an anchor network that ends earlier, on the same weights."""
    network, z = pair(second_anchor_head=1), IDS.masked_fill(IDS == 1, 0)
    weight, anchor_weight = (z == 0).double(), torch.rand(2, 8, generator=seeded(3)).double()
    scored, anchor = network.score(z, IDS, weight, anchor_weight, mask_id=0)
    one = pair()
    one.load_state_dict({name: value for name, value in network.state_dict().items() if not name.startswith("early.")})
    alone, anchor_alone = one.score(z, IDS, weight, anchor_weight, mask_id=0)
    short = AnchoredTransformer(replace(MODEL, blocks=1, denoiser_blocks=0), 12).double().eval()
    early = {name.removeprefix("early."): value for name, value in network.early.state_dict().items()}
    short.anchor.load_state_dict(network.anchor.state_dict() | early, strict=False)
    logits = short.anchor(z)
    added = (anchor_weight * F.cross_entropy(logits.transpose(1, 2), IDS, reduction="none")).sum()
    assert torch.equal(scored.total, alone.total)
    assert torch.equal(anchor.nats, anchor_alone.nats)
    torch.testing.assert_close(anchor.total, anchor_alone.total + added)


def test_a_second_anchor_head_after_the_last_block_is_a_user_error():
    with pytest.raises(UserError, match=r"second_anchor_head 2 must be below model.blocks 2.*second_anchor_head=1"):
        Model(blocks=2, second_anchor_head=2)


def test_tied_heads_without_a_denoiser_are_a_user_error():
    with pytest.raises(
        UserError, match=r"model.tie_heads true needs two heads, and model.denoiser_blocks 0 leaves one"
    ):
        replace(MODEL, denoiser_blocks=0, tie_heads=True)


def test_no_weight_anywhere_is_a_loss_of_zero_that_can_be_differentiated():
    network, nothing = pair(), torch.zeros(2, 8).double()
    scored, anchor_scored = network.score(IDS, IDS, nothing, nothing, mask_id=0)
    pulled = gradients(scored.total + anchor_scored.total, network)
    assert scored.total == 0
    assert all((gradient == 0).all() for gradient in pulled.values())


def sharded_worker(rank: int, world: int, port: int, expected: dict[tuple[str, bool], dict[str, torch.Tensor]]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        for (bridge, tied), gradients_of in expected.items():
            network = pair(bridge, tie_heads=tied)
            for block in (*network.anchor.trunk.blocks, *network.denoiser.trunk.blocks):
                fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh)  # embeddings, heads and bridge: the root group
            register_fsdp_forward_method(network, "score")
            row = IDS[rank : rank + 1]
            weight = torch.linspace(0, 1, 8).double()[None]
            scored, anchor_scored = network.score(row, row, weight, weight, mask_id=0)
            (scored.total + 0.3 * anchor_scored.total).backward()
            for name, parameter in network.named_parameters():
                assert isinstance(parameter.grad, DTensor)
                whole = world * parameter.grad.full_tensor()
                torch.testing.assert_close(whole, gradients_of[name], rtol=1e-10, atol=1e-12)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_sharded_over_two_processes_the_score_has_the_same_gradients():
    """FSDP2 gathers the weights inside `score`; folding and the chunked loss use the gathered weights."""
    weight, expected = torch.linspace(0, 1, 8).double().expand(2, 8), {}
    for bridge, tied in (*((bridge, False) for bridge in BRIDGES), ("hidden", True)):
        network = pair(bridge, tie_heads=tied)
        scored, anchor_scored = network.score(IDS, IDS, weight, weight, mask_id=0)
        expected[bridge, tied] = gradients(scored.total + 0.3 * anchor_scored.total, network)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(sharded_worker, (2, port, expected), nprocs=2)
