"""Block-causal models on tiny languages: what they reduce to, their bound and their samples by enumeration."""

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from small_models import mostly_slow

from adlm.config.schema import Config, Model, Sampling, Train, Vocabulary
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.conditional import ConditionalRow, ConditionalSettings, conditional_nats
from adlm.likelihood.estimators import ESTIMATORS
from adlm.methods import method_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.models.text_blocks import Places, TextBlocks
from adlm.models.transformer import Transformer, Trunk
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.speculative import ahead, draw_drafts, verify

MASK, BOS = 3, 0


def tiny(block_length: int, length: int = 4, method: str = "mdlm", **model) -> Config:
    """Three words, the first of which begins every row."""
    sizes = {"hidden": 16, "heads": 2, "blocks": 2, "denoiser_blocks": 1, "condition": 8, "dropout": 0.0} | model
    return Config(
        method=method,
        vocabulary=Vocabulary(size=4, mask_id=MASK, bos_id=BOS, eos_id=BOS),
        length=length,
        model=Model(**sizes, block_length=block_length, start="neighbours"),
    )


def built(config: Config, seed: int = 0):
    """The method and its network in float64, with random weights everywhere."""
    torch.manual_seed(seed)
    method = method_of(config)
    network = method.build().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return method, network


def rows(length: int) -> torch.Tensor:
    """All rows that begin with bos."""
    return torch.tensor([(BOS, *rest) for rest in itertools.product(range(3), repeat=length - 1)])


def exact_log_probs(method, network, length: int, block_length: int, order) -> torch.Tensor:
    """log p of all rows under sampling one token a call; `order(block)` are the orders of a block's positions."""
    x = rows(length)
    total = torch.zeros(len(x), dtype=torch.float64)
    for start in range(1, length, block_length):
        stop = min(start + block_length, length)
        by_order = []
        for positions in order(range(start, stop)):
            z, log_p = x.clone(), torch.zeros(len(x), dtype=torch.float64)
            z[:, start:] = MASK
            for position in positions:
                beliefs = method.log_beliefs(network, z[:, :stop])
                log_p += beliefs[:, position].gather(1, x[:, position, None])[:, 0]
                z[:, position] = x[:, position]
            by_order.append(log_p)
        total += torch.logsumexp(torch.stack(by_order), dim=0) - math.log(len(by_order))
    return total


def all_orders(block):
    return list(itertools.permutations(block))


def expected_bound(method, network, x: torch.Tensor, block_length: int) -> torch.Tensor:
    """The NELBO of every row: the mean over all orders of all blocks of -log p in that order."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for start in range(1, x.shape[1], block_length):
        stop = min(start + block_length, x.shape[1])
        orders = all_orders(range(start, stop))
        for positions in orders:
            z = x.clone()
            z[:, start:] = MASK
            for position in positions:
                beliefs = method.log_beliefs(network, z[:, :stop])
                total -= beliefs[:, position].gather(1, x[:, position, None])[:, 0] / len(orders)
                z[:, position] = x[:, position]
    return total


@pytest.mark.parametrize(("block_length", "first"), [(1, None), (2, None), (3, 1), (3, 2), (5, None), (9, None)])
def test_blocks_as_rows_and_back(block_length, first):
    cut = TextBlocks(block_length).cut(10, first)
    x = torch.arange(20).view(2, 10)
    assert [token for start, stop in cut.bounds for token in range(start, stop)] == list(range(1, 10))
    torch.testing.assert_close(cut.join(cut.split(x), torch.zeros_like(x))[:, 1:], x[:, 1:])
    assert (~cut.split_pad(x, None)).sum() == 18


def test_blocks_of_one_token_with_hidden_masks_are_the_causal_network():
    config = tiny(1, length=8, masked_keys="hidden")
    method, network = built(config)
    causal = Transformer(config.model, 4, causal=True).double().eval()
    causal.load_state_dict(network.state_dict())
    x = torch.randint(3, (5, 8))
    x[:, 0] = BOS
    expected = -causal(x)[:, :-1, :3].log_softmax(dim=-1).gather(2, x[:, 1:, None])[..., 0]
    nats = method.bound(network, x, None, BatchRng(torch.Generator().manual_seed(0)))
    counted = ESTIMATORS["any-order"](method)(network, x, None, BatchRng(torch.Generator().manual_seed(0)))
    torch.testing.assert_close(counted[:, 1:], expected.float().double(), atol=1e-6, rtol=0)
    assert (nats[:, 0] == 0).all()
    assert (counted[:, 0] == 0).all()


def test_one_block_a_row_is_the_whole_row_network_one_place_earlier():
    config = tiny(7, length=8)
    _method, network = built(config)
    whole = Transformer(config.model, 4).double().eval()
    whole.load_state_dict(network.state_dict())
    z = torch.randint(4, (5, 8))
    z[:, 0] = BOS
    torch.testing.assert_close(network(z)[:, 1:], whole(z)[:, :-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize("method_name", ["mdlm", "adlm"])
def test_a_block_sees_the_text_before_it_and_nothing_after(method_name, masked_keys):
    _method, network = built(tiny(3, length=10, method=method_name, masked_keys=masked_keys))
    z = torch.randint(3, (2, 10))
    z[:, [4, 6]] = MASK
    changed = z.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 3
    before, after = network(z), network(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-12, rtol=0)
    changed = z.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 3
    assert (network(z)[:, 4] - network(changed)[:, 4]).abs().max() > 1e-6


@pytest.mark.parametrize("method_name", mostly_slow(["mdlm", "adlm"], "adlm"))
@pytest.mark.parametrize("block_length", mostly_slow([1, 2, 3], 2))
def test_the_bound_is_a_bound_and_the_estimators_have_its_expectation(block_length, method_name):
    method, network = built(tiny(block_length, method=method_name))
    x = rows(4)
    log_p = exact_log_probs(method, network, 4, block_length, all_orders)
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)
    bound = expected_bound(method, network, x, block_length)
    assert (bound >= -log_p - 1e-9).all()
    if block_length > 1:
        assert (bound > -log_p + 1e-6).any()
    repeated = x.repeat(300, 1)
    for name in ("any-order", "nelbo"):
        nats = ESTIMATORS[name](method)(network, repeated, None, BatchRng(torch.Generator().manual_seed(1)))
        by_row = nats.sum(dim=1).view(300, -1)
        error = by_row.std(dim=0) / math.sqrt(300)
        assert ((by_row.mean(dim=0) - bound).abs() < 5 * error + 1e-6).all(), name


@pytest.mark.parametrize("hidden", ["visible", "hidden"])
def test_padding_and_random_first_blocks_change_no_expectation(hidden):
    """A padded row has the bound of the row alone; training noise covers blocks that begin anywhere."""
    config = tiny(2, length=6, masked_keys=hidden)
    _method, network = built(config)
    x = torch.tensor([[BOS, 1, 2, 1, 0, 0]])
    pad = torch.tensor([[False, False, False, False, True, True]])
    z = torch.tensor([[BOS, MASK, MASK, MASK, 0, 0]])
    weight = ((z == MASK) & ~pad).float()
    padded = network.score(z, x, weight, MASK, pad=pad).nats[:, :4]
    alone = network.score(z[:, :4], x[:, :4], weight[:, :4], MASK).nats
    torch.testing.assert_close(padded, alone, atol=1e-12, rtol=0)
    random = method_of(replace(config, train=replace(config.train, random_blocks=True)))
    drawn = {random.noise(x, pad, BatchRng(torch.Generator().manual_seed(s)), 0.0).first_block for s in range(20)}
    assert drawn == {1, 2}
    loss = random.loss(network, x, pad, 1.0, BatchRng(torch.Generator().manual_seed(0)))
    assert loss.num_tokens == 3
    assert loss.total.isfinite()


def test_the_next_token_loss_of_the_clean_copy_is_that_of_the_causal_network():
    config = tiny(3, length=8)
    config = replace(config, train=replace(config.train, causal_weight=0.5))
    method, network = built(config)
    causal = Transformer(config.model, 4, causal=True).double().eval()
    causal.load_state_dict(network.state_dict())
    x = torch.randint(3, (5, 8))
    expected = -causal(x)[:, :-1, :3].log_softmax(dim=-1).gather(2, x[:, 1:, None]).sum().detach()
    loss = method.loss(network, x, None, 1.0, BatchRng(torch.Generator().manual_seed(0)))
    assert float(loss.parts["causal"]) == pytest.approx(float(expected), abs=1e-5)
    assert float(loss.total.detach() - loss.parts["nelbo"]) == pytest.approx(float(expected) / 2, abs=1e-5)


def aligned(config: Config, weight: float = 0.7) -> Config:
    return replace(config, train=replace(config.train, align_weight=weight))


def misalignment_by_loops(network, x, z, pad, first_block: int, block_length: int, score) -> float:
    """From the outputs of all layers: per row, the mean over layers and masked tokens, times its predicted tokens."""
    states: list[torch.Tensor] = []
    layers = [layer for trunk in network.modules() if isinstance(trunk, Trunk) for layer in trunk.blocks]
    hooks = [layer.register_forward_hook(lambda _, __, output: states.append(output.detach())) for layer in layers]
    score()
    for hook in hooks:
        hook.remove()
    assert len(states) == len(layers) > 1
    length = x.shape[1]
    bounds = TextBlocks(block_length).cut(length, first_block).bounds
    noisy_place, num_noisy = {}, 0  # of the state after token l - 1, which predicts token l
    for start, stop in bounds:  # [x_(s-1), z_s, ..., z_e]
        noisy_place |= {token: num_noisy + token - start for token in range(start, stop)}
        num_noisy += 1 + stop - start
    total = 0.0
    for row in range(len(x)):
        text = [token for token in range(1, length) if not pad[row, token]]
        each = [
            1 - float(torch.dot(noisy, clean) / (noisy.norm() * clean.norm()))
            for token in text
            if z[row, token] == MASK
            for state in states
            for noisy, clean in [(state[row, noisy_place[token]], state[row, num_noisy + token - 1])]
        ]
        total += len(text) * sum(each) / max(1, len(each))
    return total


@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize(("method_name", "anchor_every"), [("mdlm", 1), ("adlm", 1), ("adlm", 2)])
def test_the_alignment_term_is_that_of_a_loop_over_layers_and_masks(method_name, anchor_every, masked_keys):
    config = tiny(3, length=9, method=method_name, masked_keys=masked_keys)
    if anchor_every > 1:
        time, sampling = replace(config.time, steps=4), Sampling(steps=4, anchor_every=anchor_every)
        config = replace(config, time=time, sampling=sampling)
    config = replace(config, train=replace(config.train, random_blocks=True))
    method, network = built(aligned(config))
    x, pad = torch.randint(3, (6, 9)), torch.zeros(6, 9, dtype=torch.bool)
    pad[1, 5:] = True
    noised = method.noise(x, pad, BatchRng(torch.Generator().manual_seed(4)), 0.3)
    assert noised.first_block != 3
    loss = method.loss_at(network, x, noised, pad)
    expected = misalignment_by_loops(
        network, x, noised.z, pad, noised.first_block, 3, lambda: method.loss_at(network, x, noised, pad)
    )
    assert expected > 0.1
    assert float(loss.parts["align"]) == pytest.approx(expected, rel=1e-6)
    plain = method_of(config).loss_at(network, x, noised, pad)
    assert float((loss.total - plain.total).detach()) == pytest.approx(0.7 * expected, rel=1e-5)


def test_without_a_weight_there_is_no_alignment_and_with_one_the_bound_is_unchanged(monkeypatch):
    config, x = tiny(2, length=8), torch.randint(3, (5, 8))
    method, network = built(aligned(config))
    rng = lambda: BatchRng(torch.Generator().manual_seed(0))  # noqa: E731
    with_term = method.loss(network, x, None, 1.0, rng())
    monkeypatch.setattr(Places, "misalignment", None)
    loss = method_of(config).loss(network, x, None, 1.0, rng())
    assert "align" in with_term.parts
    assert "align" not in loss.parts
    assert torch.equal(loss.total.detach(), with_term.parts["nelbo"])
    assert torch.equal(loss.nats, with_term.nats)
    assert network.trunk.residual_stream(torch.randn(1, 8, 16).double()).states == []


def test_the_clean_copy_is_a_target_without_gradient():
    x = torch.randint(3, (2, 7))
    places = TextBlocks(3).places(x, x)
    hidden = torch.randn(2, places.ids.shape[1], 5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).expand(2, 7)
    places.misalignment([hidden], weight).backward()
    moved = hidden.grad.abs().sum(dim=(0, 2)).nonzero()[:, 0].tolist()
    assert moved == [0, 2, 4, 6]  # places 0 and 4 are the last token before a block, which predict its first


def test_blocks_of_one_token_with_hidden_masks_are_aligned():
    """The noisy copy computes what the clean one does, so any shift between the two would show."""
    method, network = built(aligned(tiny(1, length=8, masked_keys="hidden")))
    loss = method.loss(network, torch.randint(3, (5, 8)), None, 1.0, BatchRng(torch.Generator().manual_seed(0)))
    assert float(loss.parts["align"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method_name", ["mdlm", "adlm"])
def test_training_with_the_alignment_term_lowers_the_misalignment(method_name):
    config, x = tiny(3, length=10, method=method_name), torch.randint(3, (8, 10))
    measure = method_of(aligned(config))

    def after(weight: float, steps: int) -> float:
        method, network = built(aligned(config, weight))
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for step in range(steps):
            optimizer.zero_grad()
            method.loss(network, x, None, 1.0, BatchRng(torch.Generator().manual_seed(step))).mean.backward()
            optimizer.step()
        loss = measure.loss(network, x, None, 1.0, BatchRng(torch.Generator().manual_seed(99)))
        return float(loss.parts["align"] / loss.num_tokens)

    trained = after(2.0, 30)
    assert trained < 0.7 * after(2.0, 0)
    assert trained < 0.7 * after(0.0, 30)


@pytest.mark.parametrize("method_name", ["mdlm", "adlm"])
@pytest.mark.parametrize("block_length", [1, 2, 3])
def test_the_exact_likelihoods_are_those_of_their_samplers(block_length, method_name):
    method, network = built(tiny(block_length, method=method_name))
    x, rng = rows(4), BatchRng(torch.Generator())
    left_to_right = exact_log_probs(method, network, 4, block_length, lambda block: [tuple(block)])
    nats = ESTIMATORS["left-to-right"](method)(network, x, None, rng).sum(dim=1)
    torch.testing.assert_close(-nats, left_to_right.float(), atol=1e-5, rtol=0, check_dtype=False)
    nats = ESTIMATORS["causal"](method)(network, x, None, rng).sum(dim=1)
    torch.testing.assert_close(-nats, causal_log_probs(network, x).float(), atol=1e-5, rtol=0, check_dtype=False)
    with pytest.raises(UserError, match="block_length is 0"):
        ESTIMATORS["causal"](method_of(tiny(0)))


def sampled(method, network, sampling: Sampling, num: int, length: int, seed: int = 0) -> torch.Tensor:
    canvas = torch.full((num, length), MASK)
    return last_frame(method.generate(network, canvas, sampling, RowRng(seed, range(num)))).ids


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("block_length", "sampler"),
    mostly_slow(
        [(1, "ancestral"), (2, "ancestral"), (3, "ancestral"), (2, "entropy")], (2, "ancestral"), (2, "entropy")
    ),
)
def test_samples_have_the_distribution_of_the_model(block_length, sampler, cached):
    """With so many steps that tokens come one at a time, ancestral sampling takes all orders, entropy one of them."""
    method, network = built(tiny(block_length))
    num, sampling = 6000 if cached else 1000, Sampling(sampler=sampler, steps=100_000)
    texts = sampled(method, FrozenNetwork(network) if cached else network, sampling, num, 4)
    counts = Counter(map(tuple, texts.tolist()))
    if sampler == "ancestral":
        log_p = exact_log_probs(method, network, 4, block_length, all_orders)
    else:
        log_p = entropy_log_probs(method, network, rows(4), block_length)
    expected = log_p.exp() * num
    found = torch.tensor([counts[tuple(row)] for row in rows(4).tolist()], dtype=torch.float64)
    assert found.sum() == num
    chi_square = ((found - expected) ** 2 / expected.clamp(min=1)).sum()
    assert chi_square < 27 + 5 * math.sqrt(2 * 27)


def entropy_log_probs(method, network, x, block_length):
    total = torch.zeros(len(x), dtype=torch.float64)
    for start in range(1, x.shape[1], block_length):
        stop = min(start + block_length, x.shape[1])
        z = x.clone()
        z[:, start:] = MASK
        for _ in range(start, stop):
            beliefs = method.log_beliefs(network, z[:, :stop])
            entropies = torch.special.entr(beliefs.exp()).sum(dim=-1)
            entropies[z[:, :stop] != MASK] = torch.inf
            position = entropies[:, start:].argmin(dim=1, keepdim=True) + start
            token = x.gather(1, position)
            total += beliefs[torch.arange(len(x)), position[:, 0], token[:, 0]]
            z = z.scatter(1, position, token)
    return total


@pytest.mark.parametrize(
    ("method_name", "anchor_every"), mostly_slow([("mdlm", 1), ("adlm", 1), ("adlm", 2)], ("mdlm", 1), ("adlm", 2))
)
@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "entropy", "threshold", "remdm-conf", "remdm-cap"])
def test_cached_equals_recomputed_and_batched_equals_alone(sampler, masked_keys, method_name, anchor_every):
    method, network = built(tiny(3, length=14, method=method_name, masked_keys=masked_keys))
    frozen, sampling = FrozenNetwork(network), Sampling(sampler=sampler, steps=5, anchor_every=anchor_every)
    canvas = torch.full((4, 14), MASK)
    canvas[:, 0] = BOS
    for row, prompt in enumerate((1, 2, 5, 9)):
        canvas[row, :prompt] = torch.arange(prompt) % 3
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[2, 11:] = True
    canvas[2, 11:] = 0
    plain, cached = (
        last_frame(method.generate(each, canvas, sampling, RowRng(5, range(4)), pad)).ids for each in (network, frozen)
    )
    assert (plain == cached).all()
    for row in range(4):
        length = 11 if row == 2 else 14
        alone = method.generate(frozen, canvas[row : row + 1, :length], sampling, RowRng(5, range(4))[row : row + 1])
        assert (last_frame(alone).ids[0] == cached[row, :length]).all()


@pytest.mark.parametrize(
    ("method_name", "sampler"),
    [("ar", "left-to-right"), *(("mdlm", name) for name in ("speculative", "ancestral", "entropy", "left-to-right"))],
)
def test_a_text_ends_with_its_first_end_of_text_token(method_name, sampler):
    method, network = built(tiny(0, 12, method="ar")) if method_name == "ar" else speculative(3, 12)
    canvas = torch.full((40, 12), MASK)
    canvas[:, :2] = torch.tensor([BOS, BOS])  # a given end-of-text token ends nothing
    plain, stopped = (
        last_frame(
            method.generate(
                FrozenNetwork(network), canvas, Sampling(sampler=sampler, stop_at_eos=stop), RowRng(0, range(40))
            )
        ).ids
        for stop in (False, True)
    )
    ends = 0
    for row, other in zip(stopped.tolist(), plain.tolist(), strict=True):
        assert MASK not in row
        end = row.index(BOS, 2) if BOS in row[2:] else None
        if end is not None:
            assert set(row[end:]) == {BOS}
            ends += end < 11
        assert row[:end] == other[:end]
    assert ends > 5


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match="block_length 2 is for adlm and mdlm, not ar"):
        method_of(tiny(2, method="ar"))
    for method_name in ("mdlm", "ar"):
        with pytest.raises(UserError, match="align_weight 7 is for block-causal adlm and mdlm"):
            method_of(aligned(tiny(0, method=method_name), 7))
    noisy_end = replace(tiny(2), schedule=replace(Config().schedule, eps=1e-3))
    with pytest.raises(UserError, match="every block has its own"):
        method_of(replace(noisy_end, model=replace(noisy_end.model, time_conditioning=True)))
    for chain in (0, 5):
        config = replace(tiny(2, chain=chain), train=Train(chain_target="causal"))
        with pytest.raises(UserError, match=r"train\.causal_weight is 0; use") if chain else nullcontext():
            method_of(config)
    method = method_of(tiny(2))
    with pytest.raises(UserError, match="token after a mask"):
        method.check_run(torch.tensor([[0, MASK, 1, MASK]]), Sampling(), None)
    with pytest.raises(UserError, match="semi-autoregressive"):
        method.check_run(torch.tensor([[0, MASK, MASK, MASK]]), Sampling(sampler="semi-autoregressive"), None)


def causal_log_probs(network, x: torch.Tensor) -> torch.Tensor:
    """log p of every row under the network's clean copy."""
    logits = network.causal_logits(x)[:, 1:, :3]
    return logits.log_softmax(dim=-1).gather(2, x[:, 1:, None]).sum(dim=(1, 2)).detach()


def speculative(block_length: int, length: int = 4, **model):
    config = tiny(block_length, length, **model)
    return built(replace(config, train=replace(config.train, causal_weight=1.0)))


@pytest.mark.parametrize("cached", mostly_slow([False, True], True))
@pytest.mark.parametrize(
    ("block_length", "drafts", "chain"),
    mostly_slow([(2, 1, 0), (3, 2, 0), (4, 3, 0), (4, 1, 0), (2, 0, 0), (2, 1, 5), (4, 3, 5)], (2, 1, 0), (2, 1, 5)),
)
def test_draft_and_verify_samples_the_causal_model(block_length, drafts, chain, cached):
    method, network = speculative(block_length, chain=chain)
    num = 6000 if cached else 250
    sampling = Sampling(sampler="speculative", drafts=drafts)
    texts = sampled(method, FrozenNetwork(network) if cached else network, sampling, num, 4)
    counts = Counter(map(tuple, texts.tolist()))
    expected = causal_log_probs(network, rows(4)).exp() * num
    assert expected.sum() == pytest.approx(num)
    found = torch.tensor([counts[tuple(row)] for row in rows(4).tolist()], dtype=torch.float64)
    assert ((found - expected) ** 2 / expected.clamp(min=1)).sum() < 27 + 5 * math.sqrt(2 * 27)


@pytest.mark.parametrize(
    ("method_name", "drafts", "drafter", "chain"),
    mostly_slow(
        [
            *(("mdlm", drafts, "denoiser", 0) for drafts in (2, 1, 0)),
            ("adlm", 2, "denoiser", 0),
            ("adlm", 2, "anchor", 5),
            ("mdlm", 2, "denoiser", 5),
            ("adlm", 1, "denoiser", 5),
        ],
        ("mdlm", 2, "denoiser", 0),
        ("mdlm", 0, "denoiser", 0),
        ("adlm", 2, "anchor", 5),
        ("adlm", 1, "denoiser", 5),
    ),
)
@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_drafting_equals_the_plain_form_and_greedy_text_is_that_of_the_causal_model(
    temperature, masked_keys, method_name, drafts, drafter, chain
):
    method, network = speculative(3, 14, method=method_name, masked_keys=masked_keys, chain=chain)
    sampling = Sampling(sampler="speculative", temperature=temperature, top_k=2, drafts=drafts, drafter=drafter)
    frozen = FrozenNetwork(network)
    canvas = torch.full((4, 14), MASK)
    canvas[:, 0] = BOS
    for row, prompt in enumerate((1, 2, 5, 9)):
        canvas[row, :prompt] = torch.arange(prompt) % 3
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[2, 11:] = True
    canvas[2, 11:] = 0
    plain, cached = (
        list(method.generate(each, canvas, sampling, RowRng(5, range(4)), pad)) for each in (network, frozen)
    )
    assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
    assert len(cached) <= 14
    ids = cached[-1].ids
    for row in range(4):
        length = 11 if row == 2 else 14
        alone = method.generate(frozen, canvas[row : row + 1, :length], sampling, RowRng(5, range(4))[row : row + 1])
        assert (last_frame(alone).ids[0] == ids[row, :length]).all()
        if temperature == 0:
            text = canvas[row : row + 1, :length].clone()
            for position in range(int((text == MASK).long().argmax()), length):
                text[:, position] = network.causal_logits(text[:, : position + 1])[0, -1, :3].argmax()
            assert (text[0] == ids[row, :length]).all()


@pytest.mark.parametrize("cached", mostly_slow([False, True], True))
@pytest.mark.parametrize(
    ("block_length", "method_name"), mostly_slow([(2, "mdlm"), (3, "mdlm"), (3, "adlm")], (2, "mdlm"))
)
def test_unverified_drafts_have_the_exact_likelihood_of_the_chain(block_length, method_name, cached):
    method, network = speculative(block_length, 5, method=method_name, chain=5)
    sampling, x, num = Sampling(sampler="speculative", verify=False), rows(5), 8000 if cached else 600
    expected = (-ESTIMATORS["chained"](method)(network, x, None, None)).sum(dim=1).exp().double() * num
    assert expected.sum() == pytest.approx(num)
    causal = causal_log_probs(network, x).exp() * num
    assert (expected - causal).abs().max() > 0.01 * num  # another distribution
    texts = sampled(method, FrozenNetwork(network) if cached else network, sampling, num, 5)
    counts = Counter(map(tuple, texts.tolist()))
    found = torch.tensor([counts[tuple(row)] for row in x.tolist()], dtype=torch.float64)
    assert ((found - expected) ** 2 / expected.clamp(min=1)).sum() < 81 + 5 * math.sqrt(2 * 81)


@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize("drafts", [None, 1])
def test_unverified_drafts_are_those_of_the_plain_form_alone_and_in_a_batch(masked_keys, drafts):
    method, network = speculative(3, 14, masked_keys=masked_keys, chain=5)
    sampling, frozen = Sampling(sampler="speculative", verify=False, drafts=drafts), FrozenNetwork(network)
    canvas, pad = torch.full((3, 14), MASK), torch.zeros(3, 14, dtype=torch.bool)
    for row, prompt in enumerate((1, 6, 1)):
        canvas[row, :prompt] = torch.arange(prompt) % 3
    pad[2, 2:], canvas[2, 2:] = True, 0  # a row that is finished long before the others
    plain, cached = (
        list(method.generate(each, canvas, sampling, RowRng(5, range(3)), pad)) for each in (network, frozen)
    )
    assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
    assert len(cached) == 1 + -(-13 // (3 if drafts is None else 2))
    for row, length in enumerate((14, 14, 2)):
        alone = method.generate(frozen, canvas[row : row + 1, :length], sampling, RowRng(5, range(3))[row : row + 1])
        assert (last_frame(alone).ids[0] == cached[-1].ids[row, :length]).all()


@pytest.mark.parametrize("method_name", ["mdlm", "adlm"])
def test_the_loss_of_a_chain_is_that_of_its_tokens_in_masked_blocks(method_name):
    config = tiny(3, 9, method=method_name, chain=5)
    config = replace(config, train=replace(config.train, causal_weight=0.5, chain_weight=2.0))
    _, network = built(config)
    x = torch.randint(3, (2, 9))
    z = x.clone()
    z[0, 2:5] = MASK  # a first block of one token, then whole blocks
    z[1, 2:4] = MASK  # in part
    z[1, 5:9] = MASK  # the last block is short
    noised = NoisedBatch(z, torch.full(x.shape, 0.5, dtype=torch.float64), first_block=1)
    pad = torch.zeros_like(x, dtype=torch.bool)
    loss, without = (
        method_of(each).loss_at(network, x, noised, pad)
        for each in (config, replace(config, train=replace(config.train, chain_weight=0.0)))
    )
    hidden, embedded = noisy_states(network, x, z, 1), network.embedding(x)
    expected = 0.0
    for row, start, stop in ((0, 2, 5), (1, 5, 8)):
        state = hidden[row, start]
        for token in range(start + 1, stop):
            state = network.chain(hidden[row, token], state, embedded[row, token - 1])
            logits = network.head(state).index_fill(0, torch.tensor(MASK), -torch.inf)
            expected += -logits.log_softmax(dim=-1)[x[row, token]]
    torch.testing.assert_close(loss.total - without.total, 2 * expected)
    torch.testing.assert_close(loss.parts["chain"], expected.detach())


@pytest.mark.parametrize("method_name", ["mdlm", "adlm"])
def test_a_chain_may_learn_the_distribution_of_the_clean_copy_which_has_no_gradient_from_it(method_name):
    config = tiny(3, 7, method=method_name, chain=5)
    config = replace(config, train=replace(config.train, causal_weight=0.5, chain_weight=2.0, chain_target="causal"))
    method, network = built(config)
    x = torch.randint(3, (2, 7))
    z = x.masked_fill(torch.arange(7) > 0, MASK)
    noised = NoisedBatch(z, torch.full(x.shape, 0.5, dtype=torch.float64))
    loss, without = (
        method_of(each).loss_at(network, x, noised)
        for each in (config, replace(config, train=replace(config.train, chain_weight=0.0)))
    )
    states = network.chain.states(noisy_states(network, x, z, 3), network.embedding(x), TextBlocks(3).cut(7))
    p = network.causal_logits(x).detach()[..., :3].softmax(dim=-1)
    soft_nats = -(p * network.head(states)[..., :3].log_softmax(dim=-1)).sum(dim=-1)
    expected = soft_nats[:, [2, 3, 5, 6]].sum()  # all but the first tokens of blocks
    torch.testing.assert_close(loss.parts["chain"], expected.detach())
    parameters = list(network.parameters())
    found, oracle = (
        torch.autograd.grad(total, parameters, materialize_grads=True)
        for total in (loss.total - without.total, 2 * expected)
    )
    for ours, theirs in zip(found, oracle, strict=True):
        torch.testing.assert_close(ours, theirs)
    of_text = method_of(replace(config, train=replace(config.train, chain_target="text")))
    assert torch.equal(method.chained_nats(network, x, None), of_text.chained_nats(network, x, None))


def noisy_states(network, x: torch.Tensor, z: torch.Tensor, first_block: int) -> torch.Tensor:
    blocks = (network.anchor if hasattr(network, "anchor") else network).text_blocks
    places = blocks.places(x, z, None, first_block)
    if hasattr(network, "anchor"):
        return places.noisy(network._hidden(places.ids, None, None, layout=places.layout).denoiser)
    return places.noisy(network.trunk(network.embedding(places.ids), layout=places.layout))


def test_a_new_chain_changes_nothing():
    _, network = speculative(3, chain=5)
    torch.nn.init.zeros_(network.chain.narrow.weight)
    hidden, x = torch.randn(2, 9, 16, dtype=torch.float64), torch.randint(3, (2, 9))
    states = network.chain.states(hidden, network.embedding(x), TextBlocks(3).cut(9, 2))
    torch.testing.assert_close(states[:, 1:], hidden[:, 1:])


@pytest.mark.parametrize("num", [0, 1, 5])
def test_items_come_in_order_each_after_more_have_been_made(num):
    made = []
    numbers = ahead((made.append(number) or number for number in range(4)), num)
    assert [(number, len(made)) for number in numbers] == [(n, min(n + num + 1, 4)) for n in range(4)]


def test_drafts_of_the_causal_model_itself_are_all_accepted():
    """p = q: no draft is refused, so a call gives as many tokens as it can."""

    log_p = torch.randn(1000, 4, 5, dtype=torch.float64).log_softmax(dim=-1)
    uniforms = torch.rand(1000, 7, dtype=torch.float64)
    some_token = torch.zeros(1000, dtype=torch.int64)
    drafts = draw_drafts(lambda number, token: log_p[:, number], some_token, uniforms[:, :3], Sampling())
    num_accepted, _, chance = verify(log_p, drafts, uniforms[:, 3:], Sampling())
    assert (num_accepted == 3).all()
    torch.testing.assert_close(chance[:, 0], log_p[:, 0].exp().gather(1, drafts.tokens[:, :1])[:, 0].float())


def test_what_speculative_cannot_do_is_refused():
    canvas = torch.tensor([[BOS, MASK, MASK, MASK]])
    method = method_of(tiny(2))
    with pytest.raises(UserError, match="causal_weight is 0"):
        method.check_run(canvas, Sampling(sampler="speculative"), None)
    method, _ = speculative(2)
    with pytest.raises(UserError, match="repetition_penalty"):
        method.check_run(canvas, Sampling(sampler="speculative", repetition_penalty=1.5), None)
    with pytest.raises(UserError, match=r"drafts 2 must be below model.block_length 2"):
        method.check_run(canvas, Sampling(sampler="speculative", drafts=2), None)
    with pytest.raises(UserError, match="drafter anchor needs an anchor network"):
        method.check_run(canvas, Sampling(sampler="speculative", drafter="anchor"), None)
    with pytest.raises(UserError, match=r"model.chain is 0"):
        method.check_run(canvas, Sampling(sampler="speculative", verify=False), None)
    with pytest.raises(UserError, match="nothing to keep"):
        method.check_run(canvas, Sampling(sampler="speculative", verify=False, drafts=0), None)
    with pytest.raises(UserError, match=r"model.chain 5 is for text blocks of several tokens"):
        method_of(tiny(1, chain=5))
    with pytest.raises(UserError, match="estimator chained needs a model with a chain"):
        ESTIMATORS["chained"](method)
    whole = method_of(tiny(0))
    with pytest.raises(UserError, match="needs a block-causal model"):
        whole.check_run(canvas, Sampling(sampler="speculative"), None)


@pytest.mark.parametrize("block_length", [1, 2, 3])
def test_conditional_scores_are_those_of_the_samplers(block_length):
    """The bound by all masks of every block, the exact likelihoods, and greedy decoding, of a continuation."""
    method, network = built(tiny(block_length, length=6))
    row = ConditionalRow((BOS, 1), (2, 0, 1))
    x = torch.tensor([row.ids])
    longer = ConditionalRow((BOS,), (1, 1, 2, 0, 1))  # makes padding
    by_score = {
        score: conditional_nats(method, network, [row, longer], ConditionalSettings(score=score))
        for score in ("bound", "left-to-right", "causal")
    }
    assert by_score["bound"][0].stderr == 0
    left_to_right = method.left_to_right_nats(network, x, None)[0, 2:].sum()
    causal = method.causal_nats(network, x, None)[0, 2:].sum()
    assert by_score["left-to-right"][0].nats == pytest.approx(float(left_to_right), abs=1e-5)
    assert by_score["causal"][0].nats == pytest.approx(float(causal), abs=1e-5)
    brute_force = conditional_bound(method, network, x, 2, block_length)
    assert by_score["bound"][0].nats == pytest.approx(float(brute_force), abs=1e-5)
    if block_length > 1:  # too few samples for all masks
        drawn = [conditional_nats(method, network, [row], ConditionalSettings(2, seed))[0] for seed in range(60)]
        nats = torch.tensor([result.nats for result in drawn])
        assert abs(nats.mean() - brute_force) < 4 * nats.std() / math.sqrt(len(nats))
        assert sum(result.stderr > 0 for result in drawn) > 20
    greedy = x[:, :2].tolist()[0]
    while len(greedy) < 5:
        start = 1 + (len(greedy) - 1) // block_length * block_length
        z = torch.tensor([[*greedy, *[MASK] * (min(start + block_length, 5) - len(greedy))]])
        greedy.append(int(method.log_beliefs(network, z)[0, len(greedy)].argmax()))
    assert by_score["left-to-right"][0].greedy == (greedy == x[0].tolist())
    found = conditional_nats(
        method, network, [ConditionalRow(tuple(greedy[:2]), tuple(greedy[2:]))], ConditionalSettings()
    )
    assert found[0].greedy


def conditional_bound(method, network, x, num_given, block_length):
    """The mean over orders of -log p of the tokens after the given ones, block by block."""
    total = 0.0
    for start in range(1, x.shape[1], block_length):
        stop = min(start + block_length, x.shape[1])
        orders = all_orders([position for position in range(start, stop) if position >= num_given])
        for positions in orders:
            z = x.clone()
            z[:, max(start, num_given) :] = MASK
            for position in positions:
                beliefs = method.log_beliefs(network, z[:, :stop])
                total -= float(beliefs[0, position, x[0, position]]) / len(orders)
                z[:, position] = x[:, position]
    return total


def stale(block_length: int, every: int, length: int = 4, num_steps: int = 3, **model):
    """An anchored pair whose anchor network runs every `every` of `num_steps` steps, in training and sampling."""
    config = tiny(block_length, length, method="adlm", **model)
    sampling = Sampling(steps=num_steps, anchor_every=every)
    return built(replace(config, sampling=sampling, time=replace(config.time, steps=num_steps)))


def stale_log_probs(network, x: torch.Tensor, block_length: int, every: int, patterns) -> list[torch.Tensor]:
    """Of each block of rows x (N, L), log p (patterns, N) if its i-th token is revealed at step pattern[i]."""
    blocks = []
    for start in range(1, x.shape[1], block_length):
        stop = min(start + block_length, x.shape[1])
        by_pattern = []
        for pattern in patterns(stop - start):
            step_of = torch.cat([torch.full((start,), -1), torch.tensor(pattern)])
            log_p = torch.zeros(len(x), dtype=torch.float64)
            for step in set(pattern):
                z, read = (x[:, :stop].masked_fill(step_of >= first, MASK) for first in (step, step - step % every))
                beliefs = network(z, stale=read)[..., :3].log_softmax(dim=-1)
                log_p += beliefs.gather(2, x[:, :stop, None])[..., 0][:, step_of == step].sum(dim=1)
            by_pattern.append(log_p)
        blocks.append(torch.stack(by_pattern).detach())
    return blocks


def on_the_grid(num_tokens: int):
    """With the linear schedule a token is revealed at each of three steps with the same probability."""
    return itertools.product(range(3), repeat=num_tokens)


def mixed(blocks: list[torch.Tensor]) -> torch.Tensor:
    """log p (N,) of rows whose patterns are equally likely."""
    return sum(torch.logsumexp(log_p, dim=0) - math.log(len(log_p)) for log_p in blocks)


def grid_noise(x: torch.Tensor, every: int):
    """(q, noised): all ids of one block that q draws at three steps, with those that the anchor network read last."""
    for index in (1, 2, 3):
        refreshed = 3 - ((3 - index) - (3 - index) % every)
        visible, read_visible = 1 - index / 3, 1 - refreshed / 3
        kinds = {"masked": index / 3, "revealed": visible - read_visible, "visible": read_visible}
        for token_kinds in itertools.product(kinds, repeat=x.shape[1] - 1):
            kind = np.array(["visible", *token_kinds])
            z, read = (x.masked_fill(torch.tensor(where), MASK) for where in (kind == "masked", kind != "visible"))
            t, s = (torch.full((len(x),), step / 3, dtype=torch.float64) for step in (index, index - 1))
            q = math.prod(kinds[each] for each in token_kinds) / 3
            if q:
                yield q, NoisedBatch(z, t, s, stale=read)


@pytest.mark.parametrize("bridge", mostly_slow(["logits", "hidden-plus-input", "none"], "logits"))
@pytest.mark.parametrize("every", [2, 3])
def test_the_bound_of_stale_anchors_is_a_bound_on_their_sampler(every, bridge):
    method, network = stale(3, every, bridge=bridge)
    x = rows(4)
    blocks = stale_log_probs(network, x, 3, every, on_the_grid)
    log_p, bound = mixed(blocks), -sum(log_p.mean(dim=0) for log_p in blocks)
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)
    assert (bound > -log_p + 1e-9).all()
    nats = sum(q * method.step_nats(network, x, noised, None) for q, noised in grid_noise(x, every))
    torch.testing.assert_close(nats.sum(dim=1).float().detach(), bound.float(), atol=1e-4, rtol=0)


def test_noise_draws_nested_masks_on_the_grid():
    method, _network = stale(3, 2)
    x, num = torch.tensor([[BOS, 1, 1, 2]]), 60_000
    noised = method.noise(x.expand(num, -1), None, BatchRng(torch.Generator().manual_seed(0)), 0.0)
    ids = (map(tuple, each.tolist()) for each in (noised.z, noised.stale))
    found = Counter(zip(noised.t[:, 1].tolist(), *ids, strict=True))
    expected = {
        (float(each.t[0]), tuple(each.z[0].tolist()), tuple(each.stale[0].tolist())): q for q, each in grid_noise(x, 2)
    }
    assert set(found) <= set(expected)
    chi_square = sum((found[key] - q * num) ** 2 / (q * num) for key, q in expected.items())
    assert chi_square < len(expected) + 5 * math.sqrt(2 * len(expected))


def test_anchors_that_are_not_stale_are_those_of_today():
    method, network = stale(3, 2, length=8)
    x, z = torch.randint(3, (5, 8)), torch.randint(4, (5, 8))
    x[:, 0] = z[:, 0] = BOS
    torch.testing.assert_close(network(z, stale=z), network(z), atol=1e-12, rtol=0)
    read = z.masked_fill(torch.rand(z.shape) < 0.5, MASK)
    read[:, 0] = BOS
    hidden = FrozenNetwork(network).block_hidden(z, z, None, read)[0].last
    torch.testing.assert_close(network.denoiser.head(hidden)[:, 1:], network(z, stale=read)[:, 1:], atol=1e-10, rtol=0)
    noised = method.noise(x, None, BatchRng(torch.Generator().manual_seed(0)), 0.0)
    assert (noised.stale[noised.z == MASK] == MASK).all()
    assert ((noised.stale == x) | (noised.stale == MASK)).all()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("block_length", "every", "sampler"),
    mostly_slow([(3, 2, "ancestral"), (2, 3, "ancestral"), (3, 2, "left-to-right")], (3, 2, "ancestral")),
)
def test_samples_with_stale_anchors_have_their_distribution(block_length, every, sampler, cached):
    method, network = stale(block_length, every)
    num, sampling = 6000 if cached else 1000, replace(method.config.sampling, sampler=sampler)
    texts = sampled(method, FrozenNetwork(network) if cached else network, sampling, num, 4)
    counts = Counter(map(tuple, texts.tolist()))
    patterns = on_the_grid if sampler == "ancestral" else lambda num_tokens: [tuple(range(num_tokens))]
    log_p = mixed(stale_log_probs(network, rows(4), block_length, every, patterns))
    found = torch.tensor([counts[tuple(row)] for row in rows(4).tolist()], dtype=torch.float64)
    chi_square = ((found - log_p.exp() * num) ** 2 / (log_p.exp() * num).clamp(min=1)).sum()
    assert chi_square < 27 + 5 * math.sqrt(2 * 27)
    if sampler == "left-to-right":
        nats = ESTIMATORS["left-to-right"](method)(network, rows(4), None, BatchRng(torch.Generator())).sum(dim=1)
        torch.testing.assert_close(-nats, log_p.float(), atol=1e-5, rtol=0, check_dtype=False)


@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
def test_anchor_first_scores_by_the_anchors_that_were_read_last_with_and_without_cache(masked_keys):
    method, network = stale(3, 2, length=14, masked_keys=masked_keys)
    sampling = replace(method.config.sampling, sampler="anchor-first")
    plain, cached = (sampled(method, each, sampling, 4, 14) for each in (network, FrozenNetwork(network)))
    assert (plain == cached).all()


def test_what_stale_anchors_cannot_do_is_refused():
    with pytest.raises(UserError, match="anchor_every 2 is for adlm with a denoiser, and this is method mdlm"):
        method_of(replace(tiny(2), sampling=Sampling(anchor_every=2)))
    with pytest.raises(UserError, match=r"time.steps 0 must be sampling.steps 128"):
        method_of(replace(tiny(2, method="adlm"), sampling=Sampling(anchor_every=2)))
    method, _network = stale(3, 2)
    noisy_start = replace(method.config, schedule=replace(method.config.schedule, name="geometric"))
    with pytest.raises(UserError, match=r"without masks at t = 0, and schedule\.name geometric"):
        method_of(noisy_start)
    with pytest.raises(UserError, match="speculative has none"):
        method.check_run(torch.tensor([[0, MASK]]), Sampling(sampler="speculative", anchor_every=2), None)


class CapturedFunctions:
    """CUDA graphs without CUDA: a function captured in one run is called in later ones, with copies of the inputs.

    As graphs that share their memory, each call overwrites the results of the one before.
    """

    max_graphs = 8

    def __init__(self):
        self.results, self.static = [], []

    def capture(self, function, *inputs):
        static = [None if each is None else each.clone() for each in inputs]
        self.static += static
        for _ in range(2):
            function(*static)
        captured = self

        class Graph:
            def replay(self, *inputs):
                for each, given in zip(static, inputs, strict=True):
                    if each is not None:
                        each.copy_(given)
                for each in captured.results:
                    if all(each is not kept for kept in captured.static):
                        each.zero_()
                result = function(*static)
                captured.results = list(tensors_in(result))
                return result

        return Graph()


def tensors_in(result):
    if isinstance(result, torch.Tensor):
        yield result
    elif result is not None:
        parts = result if isinstance(result, tuple) else [getattr(result, field.name) for field in fields(result)]
        for part in parts:
            yield from tensors_in(part)


@pytest.mark.parametrize(
    ("method_name", "options"),
    [
        ("ar", {"sampler": "ancestral"}),
        ("mdlm", {"sampler": "speculative", "drafts": 2}),
        ("mdlm", {"sampler": "speculative", "drafts": 2, "verify": False, "stop_at_eos": True}),
        ("adlm", {"sampler": "speculative", "drafts": 1, "drafter": "anchor", "stop_at_eos": True}),
        ("adlm", {"sampler": "ancestral", "steps": 3, "anchor_every": 2}),
        ("mdlm", {"sampler": "confidence", "steps": 3}),
    ],
)
def test_later_runs_use_the_caches_and_graphs_of_earlier_ones(method_name, options):
    if method_name == "ar":
        method, network = built(tiny(0, 13, method="ar"))
    else:
        method, network = speculative(3, 13, method=method_name, chain=5)
    sampling, frozen = Sampling(**options), FrozenNetwork(network)
    frozen.graph_cache, frozen.max_idle_caches = CapturedFunctions(), 2
    canvas = torch.full((3, 13), MASK)
    canvas[:, 0] = BOS
    other = canvas.clone()
    other[:, :4] = torch.tensor([BOS, 1, 2, 1])
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[1, 9:] = True
    other[1, 9:] = 0

    def run(network, canvas, pad, seed):
        return method.generate(network, canvas, sampling, RowRng(seed, range(3)), pad)

    fresh = [last_frame(run(FrozenNetwork(network), *each)).ids for each in ((canvas, None, 1), (other, pad, 2))]
    for _ in range(2):
        found = [last_frame(run(frozen, *each)).ids for each in ((canvas, None, 1), (other, pad, 2))]
        assert [each.tolist() for each in found] == [each.tolist() for each in fresh]
    assert len(frozen.idle_caches) == 1, "all runs had the same cache"
    first, second = run(frozen, canvas, None, 1), run(frozen, other, pad, 2)
    results = [None, None]
    for number, frame in enumerate(itertools.chain(*itertools.zip_longest(first, second))):
        if frame is not None:
            results[number % 2] = frame.ids
    assert [each.tolist() for each in results] == [each.tolist() for each in fresh]
    assert len(frozen.idle_caches) == 2, "runs at the same time have a cache each"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("masked_keys", ["visible", "hidden"])
@pytest.mark.parametrize(
    ("sampler", "anchor_every", "verify"),
    [("speculative", 1, True), ("speculative", 1, False), ("ancestral", 1, True), ("ancestral", 2, True)],
)
def test_on_a_gpu_cuda_graphs_sample_the_same_frames_and_never_overwrite_them(
    sampler, anchor_every, verify, masked_keys
):
    method, network = speculative(3, 40, method="adlm", masked_keys=masked_keys, chain=5)
    canvas = torch.full((5, 40), MASK, device="cuda")
    canvas[:, :3] = torch.tensor([BOS, 1, 2], device="cuda")
    sampling = Sampling(sampler=sampler, steps=3, anchor_every=anchor_every, drafts=2, verify=verify)
    plain = list(method.generate(network, canvas.cpu(), sampling, RowRng(1, range(5))))
    eager, graphs = (FrozenNetwork(network.cuda(), torch.float64, graphs) for graphs in (False, True))
    list(method.generate(graphs, canvas.roll(1, dims=0), sampling, RowRng(7, range(5))))  # its graphs are used again
    for each in (eager, graphs):
        frames = list(method.generate(each, canvas, sampling, RowRng(1, range(5))))
        assert [frame.ids.tolist() for frame in frames] == [frame.ids.tolist() for frame in plain]
        assert [frame.revealed.tolist() for frame in frames] == [frame.revealed.tolist() for frame in plain]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("verify", [True, False])
def test_on_a_gpu_the_kernels_draft_and_verify_as_the_plain_forms_do(verify):
    """In float32 nearly all greedy tokens are those of float64 on the host; without the kernels as with them."""
    method, network = speculative(3, 40, hidden=64, heads=4, chain=5)
    canvas = torch.full((8, 40), MASK)
    canvas[:, :2] = torch.tensor([BOS, 1])
    sampling = Sampling(sampler="speculative", temperature=0.0, drafts=2, verify=verify)
    exact = last_frame(method.generate(FrozenNetwork(network), canvas, sampling, RowRng(1, range(8)))).ids
    frozen = FrozenNetwork(network.float().cuda(), torch.float32)
    fast = last_frame(method.generate(frozen, canvas.cuda(), sampling, RowRng(1, range(8)))).ids
    assert (fast.cpu() == exact).float().mean() > 0.95


def long_text(method, network, length: int, greedy_prompt) -> list[int]:
    """Greedy text of the causal model in windows of the model's length, each with the last half of the one before."""
    row, room = list(greedy_prompt), method.config.length
    start, stop, first = 0, room, []
    while len(row) < length:
        while len(row) < min(stop, length):
            ids = torch.tensor([[*first, *row[start:], BOS]])
            logits = network.causal_logits(ids)[0, -1] if method.config.method != "ar" else network(ids)[0, -2]
            row.append(int(logits[:3].argmax()))
        first = [BOS]
        start, stop = stop - (room - 1) // 2, stop - (room - 1) // 2 + room - 1
    return row


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("method_name", ["ar", "mdlm", "adlm"])
def test_texts_longer_than_a_row_go_on_in_windows(method_name, cached):
    method, network = built(tiny(0, 6, method="ar")) if method_name == "ar" else speculative(2, 6, method=method_name)
    sampling = Sampling(sampler="left-to-right" if method_name == "ar" else "speculative", temperature=0.0, drafts=1)
    canvas = torch.full((3, 20), MASK)
    for row, prompt in enumerate((1, 3, 9)):
        canvas[row, :prompt] = torch.arange(prompt) % 3
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[1, 17:] = True
    canvas[1, 17:] = 0
    ids = last_frame(
        method.generate(FrozenNetwork(network) if cached else network, canvas, sampling, RowRng(0, range(3)), pad)
    ).ids
    for row, prompt in enumerate((1, 3, 9)):
        length = 17 if row == 1 else 20
        assert ids[row, :length].tolist() == long_text(method, network, length, canvas[row, :prompt].tolist())


@pytest.mark.parametrize("method_name", ["ar", "mdlm"])
def test_a_long_text_ends_with_its_first_end_of_text_token(method_name):
    method, network = built(tiny(0, 6, method="ar")) if method_name == "ar" else speculative(2, 6)
    sampler = "left-to-right" if method_name == "ar" else "speculative"
    with torch.no_grad():
        network.head.bias[BOS] -= 3
    canvas, frozen = torch.full((30, 20), MASK), FrozenNetwork(network)
    canvas[:, 0] = BOS
    plain, stopped = (
        last_frame(method.generate(frozen, canvas, Sampling(sampler, stop_at_eos=stop), RowRng(0, range(30)))).ids
        for stop in (False, True)
    )
    ends = [row.index(BOS, 1) if BOS in row[1:] else 20 for row in stopped.tolist()]
    for row, end in enumerate(ends):
        assert (stopped[row, :end] == plain[row, :end]).all()
        assert (stopped[row, end:] == BOS).all()
    assert len(set(ends)) > 2
    assert max(ends) > 6
