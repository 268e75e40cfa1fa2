"""Stale anchors of whole rows on a tiny language: bound and samples by enumeration, the fast form against the plain.

Those of block-causal models are in test_block_causal.py.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import mostly_slow
from test_block_causal import MASK, CapturedFunctions, built, tiny
from worlds import batch_rng

from adlm.config.schema import Rates, Sampling, Schedule, Time
from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, GraphCache
from adlm.likelihood.estimators import order
from adlm.methods import method_of
from adlm.methods.adlm import frozen_stale_denoiser
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.sampling.events import PositionsFirst, padded_num_rows
from adlm.sampling.frame import NoisyRows, last_frame
from adlm.sampling.rng import RowRng

LENGTH = 3
SAMPLERS = ["ancestral", "left-to-right", "confidence", "anchor-first", "remdm-cap", "remdm-conf", "dfm"]
RUNS = mostly_slow(
    [(sampler, steps) for steps in (4, 40) for sampler in SAMPLERS],
    *((sampler, 4) for sampler in SAMPLERS),
    *(("ancestral", 40), ("remdm-conf", 40)),
)


def stale(every: int, num_steps: int = 3, length: int = LENGTH, **model):
    """An anchored pair on whole rows whose anchor network runs every `every` of `num_steps` steps."""
    config = tiny(0, length, method="adlm", **model)
    sampling = Sampling(steps=num_steps, anchor_every=every)
    return built(replace(config, sampling=sampling, time=replace(config.time, steps=num_steps)))


def texts() -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(3), repeat=LENGTH)))


def log_probs(network, x: torch.Tensor, every: int, patterns) -> torch.Tensor:
    """log p (patterns, N) of rows x if token i is revealed at step pattern[i]."""
    by_pattern = []
    for pattern in patterns:
        step_of, log_p = torch.tensor(pattern), torch.zeros(len(x), dtype=torch.float64)
        for step in set(pattern):
            z, read = (x.masked_fill(step_of >= first, MASK) for first in (step, step - step % every))
            beliefs = network(z, stale=read)[..., :MASK].log_softmax(dim=-1)
            log_p += beliefs.gather(2, x[..., None])[..., 0][:, step_of == step].sum(dim=1)
        by_pattern.append(log_p)
    return torch.stack(by_pattern).detach()


def on_the_grid(num_steps: int):
    """With the linear schedule a token is revealed at each step with the same probability."""
    return itertools.product(range(num_steps), repeat=LENGTH)


def mixed(log_p: torch.Tensor) -> torch.Tensor:
    """log p (N,) of rows whose patterns are equally likely."""
    return torch.logsumexp(log_p, dim=0) - math.log(len(log_p))


def grid_noise(x: torch.Tensor, every: int, num_steps: int):
    """(q, noised): all ids that q draws at the steps, with those that the anchor network read last."""
    for step in range(num_steps):
        visible, read_visible = step / num_steps, (step - step % every) / num_steps
        kinds = {"masked": 1 - visible, "revealed": visible - read_visible, "visible": read_visible}
        for of_tokens in itertools.product(kinds, repeat=x.shape[1]):
            kind, q = np.array(of_tokens), math.prod(kinds[each] for each in of_tokens) / num_steps
            z, read = (x.masked_fill(torch.tensor(where), MASK) for where in (kind == "masked", kind != "visible"))
            t, s = (torch.full((len(x),), 1 - each / num_steps, dtype=torch.float64) for each in (step, step + 1))
            if q:
                yield q, NoisedBatch(z, t, s, stale=read)


@pytest.mark.parametrize("bridge", mostly_slow(["logits", "hidden-plus-input", "none"], "logits"))
@pytest.mark.parametrize(("every", "num_steps"), mostly_slow([(2, 2), (2, 3), (2, 4), (3, 4)], (2, 3)))
def test_the_bound_of_stale_anchors_is_a_bound_on_their_sampler(every, num_steps, bridge):
    method, network = stale(every, num_steps, bridge=bridge)
    x = texts()
    by_pattern = log_probs(network, x, every, on_the_grid(num_steps))
    log_p, bound = mixed(by_pattern), -by_pattern.mean(dim=0)
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)
    assert (bound > -log_p + 1e-9).all()
    nats = sum(q * method.step_nats(network, x, noised, None) for q, noised in grid_noise(x, every, num_steps))
    torch.testing.assert_close(nats.sum(dim=1).float().detach(), bound.float(), atol=1e-4, rtol=0)
    fresh = mixed(log_probs(network, x, 1, on_the_grid(num_steps)))
    assert (fresh - log_p).abs().max() > 1e-3, "another model than that of fresh anchors"


@pytest.mark.parametrize(("every", "num_steps"), mostly_slow([(2, 3), (2, 4), (3, 4)], (2, 4)))
def test_noise_draws_nested_masks_on_the_grid(every, num_steps):
    method, _network = stale(every, num_steps)
    x, num = torch.tensor([[1, 1, 2]]), 60_000
    noised = method.noise_for_bound(x.expand(num, -1), None, batch_rng()).noised
    ids = (map(tuple, each.tolist()) for each in (noised.z, noised.stale))
    found = Counter(zip((noised.t * num_steps).round().tolist(), *ids, strict=True))
    expected = {
        (round(float(each.t[0]) * num_steps), tuple(each.z[0].tolist()), tuple(each.stale[0].tolist())): q
        for q, each in grid_noise(x, every, num_steps)
    }
    assert set(found) <= set(expected)
    chi_square = sum((found[key] - q * num) ** 2 / (q * num) for key, q in expected.items())
    assert chi_square < len(expected) + 5 * math.sqrt(2 * len(expected))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("every", "num_steps", "sampler"),
    mostly_slow(
        [(2, 2, "ancestral"), (2, 3, "ancestral"), (2, 4, "ancestral"), (2, 3, "left-to-right")], (2, 3, "ancestral")
    ),
)
def test_samples_have_the_enumerated_distribution(every, num_steps, sampler, frozen):
    method, network = stale(every, num_steps)
    num, sampling = 10_000 if frozen else 3000, replace(method.config.sampling, sampler=sampler)
    canvas, sampled_from = torch.full((num, LENGTH), MASK), FrozenNetwork(network) if frozen else network
    drawn = last_frame(method.generate(sampled_from, canvas, sampling, RowRng(0, range(num)))).ids
    counts = Counter(map(tuple, drawn.tolist()))
    patterns = on_the_grid(num_steps) if sampler == "ancestral" else [range(LENGTH)]
    log_p = mixed(log_probs(network, texts(), every, patterns))
    found = torch.tensor([counts[tuple(row)] for row in texts().tolist()], dtype=torch.float64)
    chi_square = ((found - log_p.exp() * num) ** 2 / (log_p.exp() * num).clamp(min=1)).sum()
    assert chi_square < 27 + 5 * math.sqrt(2 * 27)
    if sampler == "left-to-right":
        nats = order(method, "left-to-right")(network, texts(), None, batch_rng()).sum(dim=1)
        torch.testing.assert_close(-nats, log_p, atol=1e-10, rtol=0)


def test_anchors_that_are_not_stale_are_those_of_today():
    method, network = stale(2, length=8)
    z, pad = torch.randint(4, (5, 8)), torch.zeros(5, 8, dtype=torch.bool)
    pad[2, 5:] = True
    torch.testing.assert_close(network(z, None, pad, stale=z), network(z, None, pad), atol=1e-12, rtol=0)
    frozen, where = FrozenNetwork(network), torch.arange(40)
    today = method.sampling_run(frozen, z, method.config.sampling, RowRng(0, range(5)), pad).denoiser(
        NoisyRows(z, pad=pad)
    )
    output = frozen_stale_denoiser(frozen, MASK, 1)(NoisyRows(z, pad=pad))
    for name in ("log_beliefs", "anchor_log_beliefs"):
        torch.testing.assert_close(getattr(output, name)(where), getattr(today, name)(where), atol=1e-12, rtol=0)
    fresh = method_of(replace(method.config, sampling=Sampling(steps=3)))
    assert fresh.noise(z, None, batch_rng(), 0.0).stale is None
    assert isinstance(fresh.generate(frozen, z, fresh.config.sampling, RowRng(0, range(5))), PositionsFirst)


def canvas_and_pad(length: int = 14):
    """Rows with a prompt, with holes and with padding."""
    canvas, pad = torch.full((5, length), MASK), torch.zeros(5, length, dtype=torch.bool)
    canvas[0, :4], canvas[1, 7], canvas[2, -6:], canvas[3, :-2] = 1, 2, 0, 1
    pad[2, -3:], pad[4, -1:] = True, True
    canvas[pad] = 0
    return canvas, pad


@pytest.mark.parametrize(("sampler", "steps"), RUNS)
@pytest.mark.parametrize("bridge", mostly_slow(["hidden", "none"], "hidden"))
def test_frozen_equals_plain_and_batched_equals_alone(sampler, bridge, steps):
    """With 4 steps rows are in step, with 40 each reveals tokens at steps of its own."""
    method, network = stale(2, length=14, bridge=bridge)
    sampling, rng = Sampling(sampler=sampler, steps=steps, anchor_every=3), RowRng(5, range(5))
    (canvas, pad), frozen = canvas_and_pad(), FrozenNetwork(network)
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


@pytest.mark.parametrize("bridge", ["logits", "hidden", "hidden-plus-input"])
def test_the_denoiser_reads_the_bridge_of_stale_anchors_plus_the_change_of_the_ids(bridge):
    _method, network = stale(2, length=8, bridge=bridge)
    z, embedded = torch.randint(4, (5, 8)), network.embedding
    read, denoiser = z.masked_fill(torch.rand(z.shape) < 0.5, MASK), network.denoiser
    bridged = denoiser.bridge(network.anchor.hidden(read), network.anchor.head) + embedded(z) - embedded(read)
    if bridge == "hidden-plus-input":
        bridged = bridged + embedded(read)
    hidden, _ = denoiser.trunk.hidden_and_states(bridged, None, None, None, None, False)
    torch.testing.assert_close(network(z, stale=read), denoiser.head(hidden), atol=1e-12, rtol=0)
    assert (network(z, stale=read) - network(z)).abs().max() > 1e-3


def test_the_networks_of_a_frozen_pair_run_apart():
    _method, network = stale(2, length=8)
    z, pad = torch.randint(4, (5, 8)), torch.zeros(5, 8, dtype=torch.bool)
    pad[2, 5:] = True
    read, frozen = z.masked_fill(torch.rand(z.shape) < 0.5, MASK), FrozenNetwork(network)
    last = frozen.denoise(z, frozen.read_anchors(read, pad), pad).last
    torch.testing.assert_close(network.head(last), network(z, None, pad, stale=read), atol=1e-10, rtol=0)


def calls_of_anchors(monkeypatch, num_tokens: int, sampling: Sampling, num_rows: int = 8):
    """(frame, numbers of rows that the anchor network has read for it), of every frame of a run but the canvas."""
    method, network = stale(2, length=num_tokens)
    run_anchor, read = FrozenNetwork._run_anchor, []

    def counted(self, ids, *others):
        read.append(len(ids))
        return run_anchor(self, ids, *others)

    monkeypatch.setattr(FrozenNetwork, "_run_anchor", counted)
    canvas = torch.full((num_rows, num_tokens), MASK)
    frames = method.generate(FrozenNetwork(network), canvas, sampling, RowRng(0, range(num_rows)))
    next(frames)
    for frame in frames:
        yield frame, list(read)
        read.clear()


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_the_anchor_network_runs_in_every_kth_call_of_rows_in_step(monkeypatch, sampler):
    calls = calls_of_anchors(monkeypatch, 200, Sampling(sampler=sampler, steps=10, anchor_every=4))
    assert [read for _, read in calls] == [[8] if number % 4 == 0 else [] for number in range(10)]


def test_rows_out_of_step_read_anchors_only_where_they_are_due(monkeypatch):
    """The rows of a call are rounded up to the batch halved repeatedly, those due in it also to a quarter of them."""
    period, some_due = torch.full((8,), -1), 0
    for frame, read in calls_of_anchors(monkeypatch, 12, Sampling(steps=100, anchor_every=25)):
        reveals = frame.revealed.any(dim=1)  # complete rows reveal nothing
        step = ((1 - frame.t) * 100).round().long() - 1
        due = reveals & (step // 25 != period)
        period = torch.where(reveals, step // 25, period)
        num_rows, num_due = padded_num_rows(int(reveals.sum()), 8), int(due.sum())
        assert read == ([max(padded_num_rows(num_due, num_rows), -(-num_rows // 4))] if num_due else [])
        some_due += 0 < num_due < int(reveals.sum())
    assert some_due > 3


def test_functions_of_equal_shapes_have_graphs_of_their_own():
    class Captured(CapturedFunctions):
        replay = GraphCache.replay

        def __init__(self):
            super().__init__()
            self.graphs = {}

    method, network = stale(2, length=14)
    (canvas, pad), graphs = canvas_and_pad(), FrozenNetwork(network)
    graphs.graph_cache = Captured()
    for steps, every in ((4, 2), (40, 3), (4, 1), (4, 2)):
        sampling = Sampling(steps=steps, anchor_every=every)
        runs = (method.generate(each, canvas, sampling, RowRng(3, range(5)), pad) for each in (graphs, network))
        ids = [[frame.ids.tolist() for frame in frames] for frames in runs]
        assert ids[0] == ids[1]
    assert {key[0] for key in graphs.graph_cache.graphs} == {graphs._hidden, graphs._read_anchors, graphs._denoise}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("sampler", ["ancestral", "anchor-first", "remdm-cap"])
def test_on_a_gpu_cuda_graphs_sample_the_same_frames(sampler, steps):
    method, network = stale(2, length=14)
    (canvas, pad), sampling = canvas_and_pad(), Sampling(sampler=sampler, steps=steps, anchor_every=3)
    plain = list(method.generate(network, canvas, sampling, RowRng(1, range(5)), pad))
    eager, graphs = (FrozenNetwork(network.cuda(), torch.float64, graphs) for graphs in (False, True))
    list(method.generate(graphs, canvas.roll(1, dims=0).cuda(), sampling, RowRng(7, range(5))))  # its graphs stay
    for each in (eager, graphs):
        frames = list(method.generate(each, canvas.cuda(), sampling, RowRng(1, range(5)), pad.cuda()))
        assert [frame.ids.tolist() for frame in frames] == [frame.ids.tolist() for frame in plain]


def test_micro_batches_have_the_draws_and_the_loss_of_the_whole_batch():
    method, network = stale(2, 4, length=8)
    x, portions = torch.randint(3, (6, 8)), [BatchSlice(0, 6), BatchSlice(1, 6), BatchSlice(3, 6)]
    pieces = list(zip(portions, x.split([1, 2, 3]), strict=True))
    whole = method.loss(network, x, None, 1.0, batch_rng())
    parts = [method.loss(network, rows, None, 1.0, batch_rng(rows=portion)) for portion, rows in pieces]
    torch.testing.assert_close(torch.cat([part.nats for part in parts]), whole.nats, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([part.total for part in parts]).sum(), whole.total, rtol=1e-12, atol=0)


def test_given_tokens_and_padding_are_never_masked_for_the_anchor_network():
    method, _network = stale(2, 4, length=8)
    x, given, pad = torch.randint(3, (64, 8)), torch.zeros(64, 8, dtype=torch.bool), torch.zeros(64, 8).bool()
    given[:, :2], pad[:, 6:] = True, True
    noised = method.noise(x, pad, batch_rng(), 0.0, given)
    kept = given | pad
    assert (noised.stale[kept] == x[kept]).all()
    assert (noised.stale[noised.z == MASK] == MASK).all()
    assert (noised.stale != noised.z).any()


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        ({}, {"method": "mdlm"}, "is for adlm with a denoiser, and this is method mdlm"),
        ({"denoiser_blocks": 0}, {}, "and this is model.denoiser_blocks 0"),
        ({"time_conditioning": True}, {}, "model.time_conditioning true tells them one"),
        (
            {},
            {"rates": Rates(rule="text"), "time": Time(masks="counted"), "schedule": Schedule()},
            "rates.rule text has none",
        ),
        ({}, {"time": Time(steps=4, sigma=0.1)}, "and time.sigma 0"),
        ({}, {"time": Time()}, r"time.steps 0 must be sampling.steps 4"),
        ({}, {"schedule": Schedule("geometric")}, r"without masks at t = 0, and schedule\.name geometric"),
        ({}, {"sampling": Sampling("semi-autoregressive", 4, anchor_every=2)}, "semi-autoregressive slides a window"),
    ],
    ids=str,
)
def test_what_stale_anchors_cannot_do_is_refused(model, changes, sentence):
    sampling, time = Sampling(steps=4, anchor_every=2), Time(steps=4)
    config = replace(tiny(0, method="adlm"), schedule=Schedule(eps=1e-3), sampling=sampling, time=time)
    with pytest.raises(UserError, match=sentence) as error:
        method_of(replace(config, model=replace(config.model, **model), **changes))
    assert "\n" not in str(error.value)


def test_what_stale_anchors_cannot_sample_is_refused():
    method, _network = stale(2)
    canvas = torch.full((1, LENGTH), MASK)
    method.check_run(canvas, Sampling("remdm-cap", anchor_every=4), None)
    with pytest.raises(UserError, match="semi-autoregressive slides a window"):
        method.check_run(canvas, Sampling("semi-autoregressive", anchor_every=2), None)
    fresh = replace(tiny(0, method="adlm"), schedule=Schedule(eps=1e-3))
    conditioned = method_of(replace(fresh, model=replace(fresh.model, time_conditioning=True)))
    with pytest.raises(UserError, match=r"model\.time_conditioning true"):
        conditioned.check_run(canvas, Sampling(anchor_every=2), None)
