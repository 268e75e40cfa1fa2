"""Properties of one optimizer step."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import mostly_slow
from small_runs import preload
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from worlds import randomized, seeded

from adlm.config.schema import Config, Model, Schedule, Time, Train, Vocabulary
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.registry import METHODS
from adlm.training.build import recompute_blocks
from adlm.training.optimizer import build_optimizer
from adlm.training.step import EMA, MicroBatch, TrainState, count_tokens, fast_attention, train_step

MASK = 7
CLEAN = torch.tensor([i for i in range(12) if i != MASK])
every_method = pytest.mark.parametrize("name", METHODS)


def config_of(name: str, **train) -> Config:
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


def take_steps(config, batches, steps=3, fused=True):
    """A few steps in float64 from the same weights and noise: `train_step`, or plain torch operations."""
    method = method_of(config)
    network = randomized(method.build().double()).train()
    ema, generator = EMA(network, 0.9), seeded(5)
    if fused:
        state = TrainState(method, network, build_optimizer(network, config.train), ema)
        for _ in range(steps):
            tokens = count_tokens(method, batches)
            report = train_step(state, batches, tokens, 0.5, generator)
            report.check()
        return network, ema, report
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, foreach=False, fused=False
    )
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [method.loss(network, batch.x, batch.pad, 0.5, BatchRng(generator)) for batch in batches]
        (sum(loss.total for loss in losses) / sum(int(loss.num_tokens) for loss in losses)).backward()
        norm = sum(float(weight.grad.square().sum()) for weight in network.parameters()) ** 0.5
        for weight in network.parameters():
            weight.grad *= min(1.0, config.train.clip / norm) if config.train.clip else 1.0
        optimizer.step()
        ema.update(network)
    return network, ema, None


def assert_close(ours, theirs, **tolerance):
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


CLIPS = [(name, clip) for name in METHODS for clip in (0.0, 0.01, 1e6)]  # quick: ADLM, and 0.01 with each method


@pytest.mark.parametrize(("name", "clip"), mostly_slow(CLIPS, *CLIPS[1::3], *CLIPS[:3]))
def test_the_fused_step_equals_the_step_in_plain_torch(name, clip):
    """Clipping inside AdamW's kernel, the division by tokens and the EMA."""
    x = text()
    pad = None if name == "d3pm" else right_padding(x)
    batches = [MicroBatch(x, pad), MicroBatch(text(seed=1))]
    ours, our_ema, _ = take_steps(config_of(name, clip=clip), batches)
    plain, plain_ema, _ = take_steps(config_of(name, clip=clip), batches, fused=False)
    # The fused kernel takes its scale in float32, and a step changes weights by 1e-2.
    rounding = {"rtol": 1e-6, "atol": 1e-7}
    assert_close(ours.state_dict(), plain.state_dict(), **rounding)
    assert_close(our_ema.weights, plain_ema.weights, **rounding)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours.parameters(), our_ema.weights.values(), strict=True))


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_micro_batches_of_different_lengths_add_up_to_the_whole_batch(name):
    """Autoregressive losses draw no noise, so the two runs have the same losses: equal in float64."""
    x = text()
    pad = right_padding(x)
    whole, _, of_whole = take_steps(config_of(name), [MicroBatch(x, pad)])
    parts, _, of_parts = take_steps(config_of(name), [MicroBatch(x[:1], pad[:1]), MicroBatch(x[1:], pad[1:])])
    assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-10, atol=1e-12)
    for field in ("total", "nats", "gradient_norm"):
        torch.testing.assert_close(getattr(of_parts, field), getattr(of_whole, field), rtol=1e-10, atol=1e-12)
    for part, value in of_whole.parts.items():
        torch.testing.assert_close(of_parts.parts[part], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adlm", "mdlm", "sedd"])
def test_micro_batches_with_the_same_noise_add_up_to_the_whole_batch(name, monkeypatch):
    """Masks and times are fixed per row."""
    config, x = config_of(name), text()
    method = method_of(config)
    z = x.masked_fill(torch.rand(x.shape, generator=seeded(1)) < 0.5, MASK)
    t = torch.linspace(0.2, 0.9, len(x)).double()

    def loss(self, network, rows, pad, progress, rng):
        at = [int((x == row).all(dim=1).nonzero()[0, 0]) for row in rows]
        return self.loss_at(network, rows, NoisedBatch(z[at], t[at]), pad)

    monkeypatch.setattr(type(method), "loss", loss)
    whole, _, _ = take_steps(config, [MicroBatch(x)])
    parts, _, _ = take_steps(config, [MicroBatch(x[:1]), MicroBatch(x[1:3]), MicroBatch(x[3:])])
    assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["adlm", "sedd", "d3pm"])
def test_micro_batches_with_a_batch_slice_draw_and_train_like_the_whole_batch(name):
    config, x = config_of(name), text()
    whole, _, _ = take_steps(config, [MicroBatch(x)])
    slices = [(0, 1), (1, 3), (3, len(x))]
    parts, _, _ = take_steps(config, [MicroBatch(x[a:b], batch_slice=BatchSlice(a, len(x))) for a, b in slices])
    assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-7, atol=1e-9)


def test_the_reported_norm_is_before_clipping_and_the_clipped_gradient_has_the_norm_train_clip():
    """After the first step, AdamW's first moment is (1 - beta1) g with the clipped gradient g."""
    config = config_of("mdlm", clip=0.01)
    method = method_of(config)
    network = randomized(method.build().double())
    optimizer = build_optimizer(network, config.train)
    report = train_step(TrainState(method, network, optimizer, None), [MicroBatch(text())], 48, 0.0, seeded())
    moments = [optimizer.state[weight]["exp_avg"] for weight in network.parameters()]
    assert report.gradient_norm > 0.01
    assert float(torch.nn.utils.get_total_norm(moments)) / 0.1 == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@every_method
def test_a_loss_that_is_not_finite_changes_nothing_and_is_reported(name, optimizer):
    config = config_of(name, optimizer=optimizer)
    method = method_of(config)
    network = randomized(method.build())
    state = TrainState(method, network, build_optimizer(network, config.train), None)
    arguments = ([MicroBatch(text())], 48, 0.5, seeded())
    train_step(state, *arguments).check()
    bias = next(weight for key, weight in network.named_parameters() if key.endswith("head.bias"))
    bias.data[2] = torch.nan
    before = {key: value.clone() for key, value in network.state_dict().items()}
    report = train_step(state, *arguments)
    assert all(torch.equal(before[key], value) or key.endswith("bias") for key, value in network.state_dict().items())
    with pytest.raises(UserError, match=r"loss is nan.*train\.learning_rate"):
        report.check()
    bias.data[2] = 0.0
    train_step(state, *arguments).check()  # and training can continue


def test_a_skipped_step_leaves_the_ema_and_its_count_unchanged():
    config = config_of("mdlm")
    method = method_of(config)
    network = randomized(method.build())
    ema = EMA(network, 0.9999)
    state = TrainState(method, network, build_optimizer(network, config.train), ema)
    arguments = ([MicroBatch(text())], 48, 0.5, seeded())
    train_step(state, *arguments).check()
    before = {key: value.clone() for key, value in ema.weights.items()}
    hook = next(network.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    assert not train_step(state, *arguments).finite
    hook.remove()
    assert int(ema.num_updates) == 1
    assert all(torch.equal(before[key], value) for key, value in ema.weights.items())


def test_the_mask_in_the_text_is_rejected():
    config = config_of("mdlm")
    method = method_of(config)
    network = method.build()
    state = TrainState(method, network, build_optimizer(network, config.train), None)
    x = text()
    x[1, 2] = MASK
    with pytest.raises(UserError, match="mask id 7"):
        train_step(state, [MicroBatch(x)], 48, 0.0, seeded())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning of CPUs without bf16 support
def test_a_step_under_autocast_keeps_the_dtype_of_the_weights():
    config = config_of("adlm")
    method = method_of(config)
    network = randomized(method.build())
    state = TrainState(method, network, build_optimizer(network, config.train), None, torch.bfloat16)
    report = train_step(state, [MicroBatch(text())], 48, 0.5, seeded())
    report.check()
    assert all(weight.dtype == torch.float32 == weight.grad.dtype for weight in network.parameters())


def test_recomputed_blocks_prefer_the_attention_kernels_of_the_forward_pass(monkeypatch):
    """On a GPU, other kernels store other tensors, and the backward pass fails. Here a CPU passes for a Hopper GPU."""
    attention, orders = torch.nn.functional.scaled_dot_product_attention, []

    def recording(*args, **kwargs):
        orders.append(torch._C._get_sdp_priority_order())
        return attention(*args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", recording)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("adlm.training.step.fast_attention", lambda device: fast_attention(torch.device("cuda")))
    config = config_of("mdlm")
    method = method_of(config)
    network = randomized(method.build())
    recompute_blocks(network)
    state = TrainState(method, network, build_optimizer(network, config.train), None)
    train_step(state, [MicroBatch(text())], 48, 0.5, seeded()).check()
    with fast_attention(torch.device("cuda")):
        expected = torch._C._get_sdp_priority_order()
    assert orders == [expected] * 4  # two blocks, twice each


def sharded_worker(
    rank: int, world: int, store: str, optimizer: str, expected: dict, averaged: dict, norm: torch.Tensor
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        config = config_of("a2r", clip=0.01, optimizer=optimizer)
        method = method_of(config)
        network = randomized(method.build().double())
        for block in (*network.anchor.trunk.blocks, *network.denoiser.trunk.blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        register_fsdp_forward_method(network, "score")
        ema = EMA(network, 0.9)
        state = TrainState(method, network, build_optimizer(network, config.train), ema)
        rows = text()[3 * rank : 3 * rank + 3]
        for _ in range(3):
            report = train_step(state, [MicroBatch(rows)], 42 / world, 0.5, seeded())
        torch.testing.assert_close(report.gradient_norm, norm, rtol=1e-9, atol=1e-12)
        for name, weight in network.named_parameters():
            assert isinstance(weight, DTensor)
            assert isinstance(ema.weights[name], DTensor)
            torch.testing.assert_close(weight.full_tensor(), expected[name], rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(ema.weights[name].full_tensor(), averaged[name], rtol=1e-8, atol=1e-10)
        with ema.in_place_of_weights(network):
            name, weight = next(iter(network.named_parameters()))
            torch.testing.assert_close(weight.full_tensor(), averaged[name], rtol=1e-8, atol=1e-10)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_sharded_processes_step_like_one(optimizer, tmp_path):
    """FSDP2 averages gradients: each process divides by its share of the tokens. Norm, clip, optimizer, EMA."""
    network, ema, report = take_steps(config_of("a2r", clip=0.01, optimizer=optimizer), [MicroBatch(text())])
    expected = {name: weight.detach() for name, weight in network.named_parameters()}
    values = (2, str(tmp_path / "store"), optimizer, expected, ema.weights, report.gradient_norm)
    preload()
    mp.start_processes(sharded_worker, values, nprocs=2, start_method="forkserver")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_method
def test_a_step_on_a_gpu_equals_the_step_on_the_cpu(name):
    config = config_of(name)
    method, steps = method_of(config), []
    for device in ("cpu", "cuda"):
        network = randomized(method.build().double()).to(device)
        state = TrainState(method, network, build_optimizer(network, config.train), EMA(network, 0.9))
        for _ in range(3):
            train_step(state, [MicroBatch(text())], 48, 0.5, seeded()).check()
        steps.append({key: value.cpu() for key, value in network.state_dict().items()})
    assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-5)  # times and noise are float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_a_step_of_adlm_does_not_synchronize():
    """Except for the number of positions, which is requested before the trunks and awaited after them."""
    config = replace(config_of("adlm"), anchor=replace(Config().anchor, gamma=0.1))
    method = method_of(config)
    network = randomized(method.build()).cuda()
    optimizer, ema = build_optimizer(network, config.train), EMA(network, 0.9)
    generator = torch.Generator("cuda").manual_seed(0)
    step = [TrainState(method, network, optimizer, ema, torch.bfloat16), [MicroBatch(text())], 48, 0.5, generator]
    train_step(*step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = train_step(*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report.check()
