"""Memory between sampling steps on a tiny language: bound and samples by enumeration, fast form against plain form."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from test_block_causal import MASK, CapturedFunctions, built, rows, tiny
from worlds import batch_rng

from adlm.config.schema import Rates, Sampling, Schedule, Time
from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, GraphCache
from adlm.likelihood.estimators import any_order, default_estimator, nelbo, order, path
from adlm.methods import method_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.sampling.events import PositionsFirst
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

LENGTH = 3
METHODS = ["mdlm", "adlm"]
SAMPLERS = ["ancestral", "left-to-right", "confidence", "threshold", "anchor-first", "remdm-cap", "remdm-conf", "dfm"]
RUNS = mostly_slow(
    [(sampler, steps) for steps in (4, 40) for sampler in SAMPLERS],
    *((sampler, 4) for sampler in SAMPLERS),
    *(("ancestral", 40), ("remdm-conf", 40)),
)


def remembering(name: str = "mdlm", num_steps: int = 3, length: int = LENGTH, **model):
    """A method with a memory and its network, whose random weights make the memory count."""
    config = tiny(0, length, method=name, memory=True, **model)
    method, network = built(replace(config, sampling=Sampling(steps=num_steps)))
    with torch.no_grad():
        memory_of(network).weight.mul_(5.0)
    return method, network


def memory_of(network):
    return network.memory if hasattr(network, "memory") else network.anchor.memory


def texts() -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(3), repeat=LENGTH)))


@torch.no_grad()
def log_probs(network, x: torch.Tensor, patterns) -> torch.Tensor:
    """log p (patterns, N) of rows x if token i is revealed at step pattern[i]: a plain loop."""
    by_pattern = []
    for pattern in patterns:
        step_of, log_p, states = torch.tensor(pattern), torch.zeros(len(x), dtype=torch.float64), None
        for step in sorted(set(pattern)):
            z = x.masked_fill(step_of >= step, MASK)
            memory = None if states is None else states * (z == MASK)[..., None]
            beliefs = network(z, memory=memory)[..., :MASK].log_softmax(dim=-1)
            log_p += beliefs.gather(2, x[..., None])[..., 0][:, step_of == step].sum(dim=1)
            states = network.to_remember(z, memory=memory)
        by_pattern.append(log_p)
    return torch.stack(by_pattern)


def on_the_grid(num_steps: int):
    """With the linear schedule a token is revealed at each step with the same probability."""
    return itertools.product(range(num_steps), repeat=LENGTH)


def mixed(log_p: torch.Tensor) -> torch.Tensor:
    """log p (N,) of rows whose patterns are equally likely."""
    return torch.logsumexp(log_p, dim=0) - math.log(len(log_p))


@pytest.mark.parametrize("name", METHODS)
def test_masks_read_their_states_of_the_call_before(name):
    _method, network = remembering(name, length=8)
    z = torch.randint(4, (5, 8))
    reader = network if name == "mdlm" else network.anchor
    states = reader.trunk(reader.embedding(z.masked_fill(torch.rand(z.shape) < 0.5, MASK)))
    memory = torch.where((z == MASK)[..., None], states, 0.0)
    remembered = states @ reader.memory.weight.T
    hidden = reader.trunk(torch.where((z == MASK)[..., None], reader.embedding(z) + remembered, reader.embedding(z)))
    torch.testing.assert_close(network.to_remember(z, memory=memory), hidden, atol=1e-12, rtol=0)
    if name == "adlm":
        bridged = network.denoiser.bridge(hidden, network.anchor.head)
        hidden = network.denoiser.trunk(bridged)
    torch.testing.assert_close(network(z, memory=memory), network.head(hidden), atol=1e-12, rtol=0)
    assert (network(z, memory=memory) - network(z)).abs().max() > 1e-3


@pytest.mark.parametrize("num_steps", mostly_slow([1, 2, 3, 4], 3))
@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm"))
def test_the_expectation_over_paths_is_a_bound_on_the_sampler(name, num_steps):
    method, network = remembering(name, num_steps)
    by_pattern = log_probs(network, texts(), on_the_grid(num_steps))
    torch.testing.assert_close(by_pattern.exp().sum(dim=1), torch.ones(len(by_pattern)).double(), atol=1e-12, rtol=0)
    log_p, bound = mixed(by_pattern), -by_pattern.mean(dim=0)
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-12)
    assert (bound > -log_p).all() if num_steps > 1 else torch.equal(bound, -log_p)
    number, num = 5, 3000
    x = texts()[number].expand(num, -1)
    for sampled_from in (network, FrozenNetwork(network)):
        nats = method.bound(sampled_from, x, None, batch_rng()).sum(dim=1)
        assert (nats[:, None] + by_pattern[:, number]).abs().min(dim=1).values.max() < 1e-9, "of one of the paths"
        assert abs(nats.mean() - bound[number]) <= 4 * nats.std() / num**0.5 + 1e-12  # one step has one path
    if num_steps > 1:
        with torch.no_grad():
            memory_of(network).weight.zero_()
        forgetful = mixed(log_probs(network, texts(), on_the_grid(num_steps)))
        assert (forgetful - log_p).abs().max() > 1e-3, "another model than that without memory"


def plain(config):
    return replace(config.model, memory=False)


@pytest.mark.parametrize("frozen", mostly_slow([False, True], True))
@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm"))
@pytest.mark.parametrize(
    ("num_steps", "sampler"), mostly_slow([(3, "ancestral"), (3, "left-to-right")], (3, "ancestral"))
)
def test_samples_have_the_enumerated_distribution(name, num_steps, sampler, frozen):
    method, network = remembering(name, num_steps)
    num, sampling = 10_000 if frozen else 3000, replace(method.config.sampling, sampler=sampler)
    canvas, sampled_from = torch.full((num, LENGTH), MASK), FrozenNetwork(network) if frozen else network
    drawn = last_frame(method.generate(sampled_from, canvas, sampling, RowRng(0, range(num)))).ids
    counts = Counter(map(tuple, drawn.tolist()))
    patterns = on_the_grid(num_steps) if sampler == "ancestral" else [range(LENGTH)]
    log_p = mixed(log_probs(network, texts(), patterns))
    found = torch.tensor([counts[tuple(row)] for row in texts().tolist()], dtype=torch.float64)
    chi_square = ((found - log_p.exp() * num) ** 2 / (log_p.exp() * num).clamp(min=1)).sum()
    assert chi_square < 27 + 5 * math.sqrt(2 * 27)
    if sampler == "left-to-right":
        nats = order(method, "left-to-right")(network, texts(), None, batch_rng()).sum(dim=1)
        torch.testing.assert_close(-nats, log_p, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["mdlm", "adlm", "mdlm with memory", "adlm with memory", "stale anchors", "blocks"])
def test_for_each_path_the_probabilities_of_all_texts_sum_to_1(kind):
    """Rows with the same random numbers have the same path."""
    config, x = tiny(0, LENGTH, method=kind[:4] if "mdlm" in kind else "adlm", memory="memory" in kind), texts()
    sampling = Sampling(steps=4, final="draw", anchor_every=2 if kind == "stale anchors" else 1)
    if kind == "stale anchors":
        config = replace(config, sampling=sampling, time=Time(steps=4))
    if kind == "blocks":
        config, x = tiny(2, 4), rows(4)
    method, network = built(config)
    for seed, sampled_from in itertools.product(range(3), (network, FrozenNetwork(network))):
        nats = method.sampler_nats(sampled_from, x, None, sampling, RowRng(seed, [0] * len(x)))
        torch.testing.assert_close((-nats.sum(dim=1)).exp().sum().item(), 1.0, atol=1e-10, rtol=0)


def test_the_path_bound_of_a_plain_model_is_that_of_discrete_time():
    method, network = built(replace(tiny(0, LENGTH), sampling=Sampling(steps=3), time=Time(steps=3)))
    bound = -log_probs_without_memory(network).mean(dim=0)
    x, num = texts()[5].expand(4000, -1), 4000
    for estimator in (path(method), path(method, 3), nelbo(method)):
        nats = estimator(network, x, None, batch_rng()).double().sum(dim=1)
        assert abs(nats.mean() - bound[5]) < 4 * nats.std() / num**0.5
    other = path(method, 1)(network, texts(), None, batch_rng()).sum(dim=1)
    torch.testing.assert_close(-other, log_probs_without_memory(network)[0], atol=1e-10, rtol=0)


@torch.no_grad()
def log_probs_without_memory(network):
    by_pattern = []
    for pattern in on_the_grid(3):
        step_of, x = torch.tensor(pattern), texts()
        beliefs = [network(x.masked_fill(step_of >= step, MASK))[..., :MASK].log_softmax(dim=-1) for step in range(3)]
        own = torch.stack([each.gather(2, x[..., None])[..., 0] for each in beliefs])
        by_pattern.append(own.gather(0, step_of.expand(1, len(x), -1))[0].sum(dim=1))
    return torch.stack(by_pattern)


@pytest.mark.parametrize("name", METHODS)
def test_with_weights_of_zero_it_is_the_model_without_memory(name):
    config = replace(tiny(0, 14, method=name), sampling=Sampling(steps=6))
    without, network = built(config)
    method = method_of(replace(config, model=replace(config.model, memory=True)))
    with_memory = method.build().double().eval()
    new = {key: value for key, value in with_memory.state_dict().items() if "memory" in key}
    assert new
    assert not any(value.any() for value in new.values())
    with_memory.load_state_dict(network.state_dict() | new)
    canvas, pad = canvas_and_pad()
    for first, second in ((network, with_memory), (FrozenNetwork(network), FrozenNetwork(with_memory))):
        frames = (
            list(each.generate(on, canvas, config.sampling, RowRng(3, range(5)), pad))
            for each, on in ((without, first), (method, second))
        )
        for before, now in zip(*frames, strict=True):
            assert torch.equal(before.ids, now.ids)
            torch.testing.assert_close(now.chance, before.chance, atol=1e-12, rtol=0)
    x = torch.randint(3, (6, 14))
    losses = [each.loss(on, x, None, 1.0, batch_rng()) for each, on in ((without, network), (method, with_memory))]
    torch.testing.assert_close(losses[1].nats, losses[0].nats, atol=1e-12, rtol=0)
    assert isinstance(without.generate(network, canvas, config.sampling, RowRng(3, range(5)), pad), PositionsFirst)
    assert not isinstance(
        method.generate(with_memory, canvas, config.sampling, RowRng(3, range(5)), pad), PositionsFirst
    )


def canvas_and_pad(length: int = 14):
    """Rows with a prompt, with holes and with padding."""
    canvas, pad = torch.full((5, length), MASK), torch.zeros(5, length, dtype=torch.bool)
    canvas[0, :4], canvas[1, 7], canvas[2, -6:], canvas[3, :-2] = 1, 2, 0, 1
    pad[2, -3:], pad[4, -1:] = True, True
    canvas[pad] = 0
    return canvas, pad


@pytest.mark.parametrize(("sampler", "steps"), RUNS)
@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm"))
def test_frozen_equals_plain_and_batched_equals_alone(sampler, name, steps):
    """With 4 steps rows are in step, with 40 each reveals tokens at steps of its own."""
    if sampler == "anchor-first" and name == "mdlm":
        sampler = "entropy"
    method, network = remembering(name, length=14)
    sampling, rng = Sampling(sampler=sampler, steps=steps, threshold=0.5), RowRng(5, range(5))
    (canvas, pad), frozen = canvas_and_pad(), FrozenNetwork(network)
    method.check_run(canvas, sampling, pad)
    plain, fast = (list(method.generate(each, canvas, sampling, rng[:], pad)) for each in (network, frozen))
    assert [frame.ids.tolist() for frame in fast] == [frame.ids.tolist() for frame in plain]
    torch.testing.assert_close(fast[-1].chance, plain[-1].chance, atol=1e-6, rtol=0)
    fixed = last_frame(method.generate(FrozenNetwork(network, batch=6), canvas, sampling, rng[:], pad))
    assert torch.equal(fixed.ids, fast[-1].ids)
    for row in range(5):
        ends = int((~pad[row]).sum())
        alone = last_frame(method.generate(frozen, canvas[row : row + 1, :ends], sampling, rng[row : row + 1]))
        assert (alone.ids[0] == fast[-1].ids[row, :ends]).all()
        torch.testing.assert_close(alone.chance[0], fast[-1].chance[row, :ends], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_captured_functions_do_not_overwrite_the_memory(name):
    class Captured(CapturedFunctions):
        replay = GraphCache.replay

        def __init__(self):
            super().__init__()
            self.graphs = {}

    method, network = remembering(name, length=14)
    (canvas, pad), graphs = canvas_and_pad(), FrozenNetwork(network)
    graphs.graph_cache = Captured()
    for steps in (4, 40, 4):
        sampling = Sampling(steps=steps)
        runs = (method.generate(each, canvas, sampling, RowRng(3, range(5)), pad) for each in (graphs, network))
        ids = [[frame.ids.tolist() for frame in frames] for frames in runs]
        assert ids[0] == ids[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("sampler", ["ancestral", "entropy", "remdm-cap", "remdm-conf"])
def test_on_a_gpu_cuda_graphs_sample_the_same_frames(sampler, steps):
    method, network = remembering("adlm", length=14)
    (canvas, pad), sampling = canvas_and_pad(), Sampling(sampler=sampler, steps=steps)
    plain = list(method.generate(network, canvas, sampling, RowRng(1, range(5)), pad))
    eager, graphs = (FrozenNetwork(network.cuda(), torch.float64, graphs) for graphs in (False, True))
    list(method.generate(graphs, canvas.roll(1, dims=0).cuda(), sampling, RowRng(7, range(5))))  # its graphs stay
    for each in (eager, graphs):
        frames = list(method.generate(each, canvas.cuda(), sampling, RowRng(1, range(5)), pad.cuda()))
        assert [frame.ids.tolist() for frame in frames] == [frame.ids.tolist() for frame in plain]


@pytest.mark.parametrize(("num_steps", "step"), [(3, 0), (3, 1), (3, 2), (4, 3)])
def test_training_reads_what_the_sampler_has_read_in_the_call_before(num_steps, step):
    """All paths of the sampler, by the state that they have reached and the state of their last call."""
    method, _network = remembering("mdlm", num_steps)
    expected: Counter = Counter()
    x, num = torch.tensor([0, 1, 2]), 40_000
    for pattern in on_the_grid(num_steps):
        step_of = torch.tensor(pattern)
        before = step_of[step_of < step]
        last = int(before.max()) if len(before) else step
        ids = (tuple(x.masked_fill(step_of >= each, MASK).tolist()) for each in (step, last))
        expected[tuple(ids)] += num / num_steps**LENGTH
    t = torch.full((num,), 1 - step / num_steps, dtype=torch.float64)
    rng, many = batch_rng(), x.expand(num, -1)
    z = method.noise_at(many, None, t, rng)
    last_call = method.last_call(NoisedBatch(z, t), None, rng)
    found = Counter(zip(map(tuple, z.tolist()), map(tuple, last_call.ids.tolist()), strict=True))
    assert set(found) <= set(expected)
    chi_square = sum((found[key] - each) ** 2 / each for key, each in expected.items())
    assert chi_square < len(expected) + 5 * math.sqrt(2 * len(expected))
    remembers = last_call.remembering
    assert not remembers[(z == last_call.ids).all(dim=1)].any(), "a row in which nothing is revealed"
    assert (remembers <= (z == MASK)).all()
    if step:
        could = (z == MASK).any(dim=1) & (z != last_call.ids).any(dim=1)
        assert float(remembers.any(dim=1)[could].double().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_that_of_the_second_pass(name):
    method, network = remembering(name, length=8)
    x = torch.randint(3, (16, 8))
    drawn = replace(method.noise(x, None, batch_rng(), 0.0), last_call=None)
    drawn = replace(drawn, last_call=method.last_call(drawn, None, batch_rng(1)))
    method.loss_at(network, x, drawn).total.backward()
    ours = {key: weight.grad.clone() for key, weight in network.named_parameters() if weight.grad is not None}
    network.zero_grad()
    call = drawn.last_call
    memory = network.to_remember(call.ids).detach() * call.remembering[..., None]
    weight = method.weight(drawn) * (drawn.z == MASK)
    logits = network(drawn.z, memory=memory).index_fill(-1, torch.tensor(MASK), -torch.inf)
    total = -(weight * logits.log_softmax(dim=-1).gather(-1, x[..., None])[..., 0]).sum()
    if name == "adlm":
        anchor = network.anchor_logits(drawn.z, memory=memory).log_softmax(dim=-1).gather(-1, x[..., None])[..., 0]
        total = total - method.gamma_at(1.0) * (method.weight(drawn) * method.anchors(x, None) * anchor).sum()
    total.backward()
    assert memory_of(network).weight.grad.norm() > 1e-3
    for key, weight in network.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(ours[key], weight.grad, atol=1e-6, rtol=1e-6)


def test_under_autocast_all_weights_have_a_gradient():
    """A weight that autocast has converted in a pass without gradient must not stay without one."""
    method, network = remembering("adlm", length=8)
    network = network.float().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = method.loss(network, torch.randint(3, (16, 8)), None, 1.0, batch_rng())
    loss.total.backward()
    assert all(
        weight.grad is not None and weight.grad.any()
        for key, weight in network.named_parameters()
        if ".blocks" in key and "modulation.weight" not in key
    )
    assert memory_of(network).weight.grad.any()


def test_micro_batches_have_the_draws_and_the_loss_of_the_whole_batch():
    method, network = remembering("adlm", 4, length=8)
    x, portions = torch.randint(3, (6, 8)), [BatchSlice(0, 6), BatchSlice(1, 6), BatchSlice(3, 6)]
    pieces = list(zip(portions, x.split([1, 2, 3]), strict=True))
    whole = method.loss(network, x, None, 1.0, batch_rng())
    parts = [method.loss(network, each, None, 1.0, batch_rng(rows=portion)) for portion, each in pieces]
    torch.testing.assert_close(torch.cat([part.nats for part in parts]), whole.nats, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([part.total for part in parts]).sum(), whole.total, rtol=1e-12, atol=0)
    whole = path(method)(network, x, None, batch_rng())
    parts = [path(method)(network, each, None, batch_rng(rows=portion)) for portion, each in pieces]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-10)


def test_given_tokens_and_padding_are_never_masked():
    method, network = remembering("mdlm", 4, length=8)
    x, given, pad = torch.randint(3, (64, 8)), torch.zeros(64, 8, dtype=torch.bool), torch.zeros(64, 8).bool()
    given[:, :2], pad[:, 6:] = True, True
    noised = method.noise(x, pad, batch_rng(), 0.0, given)
    call, kept = method.last_call(noised, pad, batch_rng(1)), given | pad
    assert (call.ids[kept] == x[kept]).all()
    assert (call.ids[noised.z == MASK] == MASK).all()
    assert (call.ids != noised.z).any()
    nats = path(method)(network, x, pad, batch_rng(), given)
    assert ((nats != 0) == ~kept).all()
    alone = path(method)(network, x[:, :6], None, batch_rng(), given[:, :6])
    torch.testing.assert_close(nats[:, :6], alone, atol=1e-10, rtol=0)


def test_other_estimators_leave_the_memory_out():
    method, network = remembering("mdlm", length=8)
    without = method_of(replace(method.config, model=plain(method.config)))
    x = torch.randint(3, (6, 8))
    assert default_estimator(method) == "path"
    ours, theirs = (any_order(each)(network, x, None, batch_rng()) for each in (method, without))
    assert torch.equal(ours, theirs)
    with_memory, alone = (path(each)(network, x, None, batch_rng()) for each in (method, without))
    assert (with_memory - alone).abs().max() > 1e-3
    assert torch.equal(nelbo(method)(network, x, None, batch_rng()), with_memory)


@pytest.mark.parametrize(
    ("changes", "model", "other"),
    [
        ({"method": "ar"}, {}, "method ar"),
        ({}, {"block_length": 2}, "model.block_length 2"),
        ({"schedule": Schedule(eps=1e-3)}, {"time_conditioning": True}, "model.time_conditioning true"),
        ({"rates": Rates(rule="text"), "time": Time(masks="counted")}, {}, "rates.rule text"),
        (
            {"method": "adlm", "sampling": Sampling(steps=4, anchor_every=2), "time": Time(steps=4)},
            {},
            "sampling.anchor_every 2",
        ),
        ({"sampling": Sampling("semi-autoregressive")}, {}, "sampling.sampler semi-autoregressive, which slides"),
    ],
    ids=str,
)
def test_models_that_cannot_remember_are_refused(changes, model, other):
    config = tiny(0, memory=True)
    with pytest.raises(UserError, match=rf"model\.memory true is for adlm and mdlm .*{other}") as error:
        method_of(replace(config, model=replace(config.model, **model), **changes))
    assert "\n" not in str(error.value)


def test_samplers_that_cannot_remember_are_refused():
    method, _network = remembering("adlm")
    canvas = torch.full((1, LENGTH), MASK)
    method.check_run(canvas, Sampling("remdm-cap"), None)
    for sampling in (Sampling("semi-autoregressive"), Sampling(anchor_every=2)):
        with pytest.raises(UserError, match=r"model\.memory true is for adlm and mdlm"):
            method.check_run(canvas, sampling, None)
