"""Laws of one optimiser step."""

import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from worlds import seeded, wake

from adlm.config.schema import Config, Model, Schedule, Time, Train, Vocabulary
from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.methods import METHODS, method_of
from adlm.methods.noising import NoisedBatch
from adlm.training.ema import EMA
from adlm.training.optimizer import build_optimizer
from adlm.training.step import MicroBatch, count_tokens, train_step

MASK = 7
CLEAN = torch.tensor([i for i in range(12) if i != MASK])
every_method = pytest.mark.parametrize("name", METHODS)


def settings(name: str, **train) -> Config:
    return Config(
        method=name,
        vocabulary=Vocabulary(size=12, mask_id=MASK, bos_id=3),
        length=8,
        model=Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0),
        schedule=Schedule(eps=1e-3 if name in ("sedd", "d3pm") else 0.0),
        time=Time(steps=20 if name == "d3pm" else 0),
        train=Train(learning_rate=1e-2, **train),
    )


def text(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return CLEAN[torch.randint(len(CLEAN), (rows, 8), generator=seeded(seed))]


def right_padding(x: torch.Tensor) -> torch.Tensor:
    """Row i of six ends with i pads."""
    return torch.arange(8) >= 8 - torch.arange(len(x))[:, None]


def take(config, batches, steps=3, fast=True):
    """A few steps in float64 from the same weights and draws, ours or written out."""
    method = method_of(config)
    network = wake(method.build().double()).train()
    average, draws = EMA(network, 0.9), seeded(5)
    if fast:
        optimizer = build_optimizer(network, config.train)
        for _ in range(steps):
            tokens = count_tokens(method, batches)
            report = train_step(method, network, optimizer, average, batches, tokens, 0.5, draws)
            report.check()
        return network, average, report
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, foreach=False, fused=False
    )
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [method.loss(network, batch.x, batch.pad, 0.5, draws) for batch in batches]
        (sum(loss.total for loss in losses) / sum(int(loss.num_tokens) for loss in losses)).backward()
        norm = sum(float(weight.grad.square().sum()) for weight in network.parameters()) ** 0.5
        for weight in network.parameters():
            weight.grad *= min(1.0, config.train.clip / norm) if config.train.clip else 1.0
        optimizer.step()
        average.update(network)
    return network, average, None


def same(ours, theirs, **tolerance):
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@every_method
@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_the_fused_step_is_the_step_written_out(name, clip):
    """Clipping inside AdamW's kernel, the division by tokens, the average: as torch's plain parts have them."""
    x = text()
    pad = None if name == "d3pm" else right_padding(x)
    batches = [MicroBatch(x, pad), MicroBatch(text(seed=1))]
    ours, our_average, _ = take(settings(name, clip=clip), batches)
    plain, plain_average, _ = take(settings(name, clip=clip), batches, fast=False)
    rounding = {"rtol": 1e-6, "atol": 1e-7}  # the fused kernel takes its scale in float32, and moves by 1e-2 a step
    same(ours.state_dict(), plain.state_dict(), **rounding)
    same(our_average.weights, plain_average.weights, **rounding)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours.parameters(), our_average.weights.values(), strict=True))


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_micro_batches_of_unlike_length_add_up_to_the_whole_batch(name):
    """Nothing is drawn from left to right, so the two runs see the same losses: equal in float64."""
    x = text()
    pad = right_padding(x)
    whole, _, of_whole = take(settings(name), [MicroBatch(x, pad)])
    parts, _, of_parts = take(settings(name), [MicroBatch(x[:1], pad[:1]), MicroBatch(x[1:], pad[1:])])
    same(parts.state_dict(), whole.state_dict(), rtol=1e-10, atol=1e-12)
    for field in ("total", "nats", "norm"):
        torch.testing.assert_close(getattr(of_parts, field), getattr(of_whole, field), rtol=1e-10, atol=1e-12)
    for part, value in of_whole.parts.items():
        torch.testing.assert_close(of_parts.parts[part], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adlm", "mdlm", "sedd"])
def test_micro_batches_of_one_noising_add_up_too(name, monkeypatch):
    """The same with masks and times that belong to the row."""
    config, x = settings(name), text()
    method = method_of(config)
    z = x.masked_fill(torch.rand(x.shape, generator=seeded(1)) < 0.5, MASK)
    t = torch.linspace(0.2, 0.9, len(x)).double()

    def loss(self, network, rows, pad, progress, generator, portion=None):
        at = [int((x == row).all(dim=1).nonzero()[0, 0]) for row in rows]
        return self.loss_at(network, rows, NoisedBatch(z[at], t[at]), pad)

    monkeypatch.setattr(type(method), "loss", loss)
    whole, _, _ = take(config, [MicroBatch(x)])
    parts, _, _ = take(config, [MicroBatch(x[:1]), MicroBatch(x[1:3]), MicroBatch(x[3:])])
    same(parts.state_dict(), whole.state_dict(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["adlm", "sedd", "d3pm"])
def test_micro_batches_that_know_their_place_draw_and_train_like_the_whole_batch(name):
    config, x = settings(name), text()
    whole, _, _ = take(config, [MicroBatch(x)])
    places = [(0, 1), (1, 3), (3, len(x))]
    parts, _, _ = take(config, [MicroBatch(x[a:b], portion=BatchSlice(a, len(x))) for a, b in places])
    same(parts.state_dict(), whole.state_dict(), rtol=1e-7, atol=1e-9)


def test_the_norm_is_that_of_the_mean_and_a_clipped_step_has_the_norm_of_the_clip():
    """SGD's view of the step: with AdamW's moments fresh, m = (1 - beta1) g, clipped."""
    config = settings("mdlm", clip=0.01)
    method = method_of(config)
    network = wake(method.build().double())
    optimizer = build_optimizer(network, config.train)
    report = train_step(method, network, optimizer, None, [MicroBatch(text())], 48, 0.0, seeded())
    moments = [optimizer.state[weight]["exp_avg"] for weight in network.parameters()]
    assert report.norm > 0.01
    assert float(torch.nn.utils.get_total_norm(moments)) / 0.1 == pytest.approx(0.01, rel=1e-6)


@every_method
def test_a_loss_that_is_not_finite_moves_nothing_and_is_told(name):
    config = settings(name)
    method = method_of(config)
    network = wake(method.build())
    optimizer = build_optimizer(network, config.train)
    arguments = ([MicroBatch(text())], 48, 0.5, seeded())
    train_step(method, network, optimizer, None, *arguments).check()
    sick = next(weight for key, weight in network.named_parameters() if key.endswith("head.bias"))
    sick.data[2] = torch.nan
    before = {key: value.clone() for key, value in network.state_dict().items()}
    report = train_step(method, network, optimizer, None, *arguments)
    assert all(torch.equal(before[key], value) or key.endswith("bias") for key, value in network.state_dict().items())
    with pytest.raises(UserError, match=r"loss is nan.*train\.learning_rate"):
        report.check()
    sick.data[2] = 0.0
    train_step(method, network, optimizer, None, *arguments).check()  # and the run can go on


def test_a_skipped_step_leaves_the_average_and_its_count_as_they_were():
    config = settings("mdlm")
    method = method_of(config)
    network = wake(method.build())
    optimizer, average = build_optimizer(network, config.train), EMA(network, 0.9999)
    arguments = ([MicroBatch(text())], 48, 0.5, seeded())
    train_step(method, network, optimizer, average, *arguments).check()
    before = {key: value.clone() for key, value in average.weights.items()}
    hook = next(network.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    assert not train_step(method, network, optimizer, average, *arguments).finite
    hook.remove()
    assert int(average.num_updates) == 1
    assert all(torch.equal(before[key], value) for key, value in average.weights.items())


def test_the_mask_in_the_text_is_refused_where_the_text_enters():
    config = settings("mdlm")
    method = method_of(config)
    network = method.build()
    x = text()
    x[1, 2] = MASK
    with pytest.raises(UserError, match="mask id 7"):
        train_step(method, network, build_optimizer(network, config.train), None, [MicroBatch(x)], 48, 0.0, seeded())
    with pytest.raises(UserError, match="mask id 7"):  # and outside a step the method still looks for itself
        method.loss(network, x, None, 0.0, seeded())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so and goes on
def test_a_step_under_autocast_leaves_the_weights_in_their_precision():
    config = settings("adlm")
    method = method_of(config)
    network = wake(method.build())
    optimizer = build_optimizer(network, config.train)
    report = train_step(
        method, network, optimizer, None, [MicroBatch(text())], 48, 0.5, seeded(), lowered=torch.bfloat16
    )
    report.check()
    assert all(weight.dtype == torch.float32 == weight.grad.dtype for weight in network.parameters())


def sharded_worker(rank: int, world: int, port: int, expected: dict, averaged: dict, norm: torch.Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        config = settings("a2r", clip=0.01)
        method = method_of(config)
        network = wake(method.build().double())
        for block in (*network.anchor.trunk.blocks, *network.denoiser.trunk.blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        register_fsdp_forward_method(network, "score")
        optimizer, average = build_optimizer(network, config.train), EMA(network, 0.9)
        rows = text()[3 * rank : 3 * rank + 3]
        for _ in range(3):
            report = train_step(method, network, optimizer, average, [MicroBatch(rows)], 42 / world, 0.5, seeded())
        torch.testing.assert_close(report.norm, norm, rtol=1e-9, atol=1e-12)
        for name, weight in network.named_parameters():
            assert isinstance(weight, DTensor)
            assert isinstance(average.weights[name], DTensor)
            torch.testing.assert_close(weight.full_tensor(), expected[name], rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(average.weights[name].full_tensor(), averaged[name], rtol=1e-8, atol=1e-10)
        with average.in_place_of_weights(network):
            name, weight = next(iter(network.named_parameters()))
            torch.testing.assert_close(weight.full_tensor(), averaged[name], rtol=1e-8, atol=1e-10)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_two_sharded_processes_step_like_one():
    """FSDP2 averages gradients: each process divides by its share of the tokens. Norm, clip, AdamW, average."""
    network, average, report = take(settings("a2r", clip=0.01), [MicroBatch(text())])
    expected = {name: weight.detach() for name, weight in network.named_parameters()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(sharded_worker, (2, port, expected, average.weights, report.norm), nprocs=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_method
def test_a_step_on_a_gpu_is_the_step_on_the_host(name):
    config = settings(name)
    method, steps = method_of(config), []
    for device in ("cpu", "cuda"):
        network = wake(method.build().double()).to(device)
        optimizer, average = build_optimizer(network, config.train), EMA(network, 0.9)
        for _ in range(3):
            train_step(method, network, optimizer, average, [MicroBatch(text())], 48, 0.5, seeded()).check()
        steps.append({key: value.cpu() for key, value in network.state_dict().items()})
    same(steps[1], steps[0], rtol=1e-4, atol=1e-5)  # times and noise enter in float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_a_step_of_the_published_method_never_waits_for_the_device():
    """But for the number of positions, which is asked for before the trunks and waited for after them."""
    config = replace(settings("adlm"), anchor=replace(Config().anchor, gamma=0.1))
    method = method_of(config)
    network = wake(method.build()).cuda()
    optimizer, average = build_optimizer(network, config.train), EMA(network, 0.9)
    draws = torch.Generator("cuda").manual_seed(0)
    step = [method, network, optimizer, average, [MicroBatch(text())], 48, 0.5, draws, torch.bfloat16]
    train_step(*step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = train_step(*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report.check()
