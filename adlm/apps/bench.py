"""The speed of training and of sampling: time, memory, FLOPs and network calls. Random tokens (Zipf), no dataset.

Shapes: B sequences, L tokens.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import subs
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.inference.frozen import AnchorStates, FrozenNetwork, HiddenStates, KVCache, Result
from adlm.language_model import LanguageModel
from adlm.methods import method_of
from adlm.methods.inputs import check_canvas
from adlm.methods.masked_diffusion import MaskedDiffusion, logits_everywhere
from adlm.methods.method import Method
from adlm.models.float8 import use_float8
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.reference import reference_transition, sample_reference
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sample_analytic, sampler_of
from adlm.training.build import compile_trunks, recompute_blocks
from adlm.training.metrics import count_flops, datasheet_flops, training_flops, zipf
from adlm.training.step import MicroBatch, StepReport, count_tokens, new_train_state, train_step

WARM_UP_STEPS = 5
PROFILED_STEPS = 3

# Categories of kernels: a kernel belongs to the first one that has a substring of its name.
KERNEL_CATEGORIES = {
    "attention": ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitKreduce", "gemv", "addmm", "::mm", "::bmm", "linear"),
    "cross-entropy": ("logit_gradients_kernel", "logsumexp"),
    "optimizer, norm and EMA": ("multi_tensor_apply", "_fused_adamw", "lerp"),
    "fused elementwise": ("triton_",),
}


@dataclass(frozen=True)
class TrainingSpeed:
    """One measurement of the full step, from drawing noise to updating the EMA."""

    device: str
    tokens_a_step: int
    milliseconds: float
    """Of a step: the median."""
    tokens_per_second: float
    peak_gib: float | None
    """Peak memory allocated on the GPU; None on a CPU."""
    tflop_a_step: float
    """10^12 operations of the step's matrix products and attention, forward and backward, as torch counts them.

    With train.recompute they are counted from the shapes, without the second forward pass.
    """
    product_tflops: float
    """TFLOP/s of one large matrix product on this device, in bfloat16 on a GPU."""
    of_product: float
    """The step's FLOP/s divided by those of the large product."""
    of_datasheet: float | None
    """MFU: the step's FLOP/s divided by the datasheet's peak; None for unlisted devices."""
    compiled: bool
    remark: str
    """Why the network is not compiled although that was requested; else empty."""
    profile: tuple[tuple[str, float], ...] = ()
    """Milliseconds per step by kernel category, if requested."""


Step = Callable[[], StepReport]


class SpeedProgress(Protocol):
    """Receives the progress of a measurement on a CPU. A measurement on a GPU is short and reports nothing."""

    def begin(self, steps: int, seconds: float) -> None:
        """`steps` steps follow, which take about `seconds` in all."""
        ...

    def step(self, done: int) -> None:
        """`done` steps are done."""
        ...


def measure_training(
    config: Config,
    batch: int,
    steps: int,
    compiled: bool,
    device: torch.device,
    profiled: bool,
    progress: SpeedProgress,
) -> TrainingSpeed:
    """Time `steps` steps on the same random batch, after a warm-up."""
    method = method_of(config)
    network = fresh_network(method, device).train()
    state = new_train_state(method, network, torch.bfloat16 if device.type == "cuda" else None)
    x = zipf(config, batch, torch.Generator().manual_seed(config.train.seed))

    def make_step(rows: int, length: int) -> Step:
        """A step on the first `rows` rows and `length` tokens of the batch, with every term that the loss ever has."""
        batches = [MicroBatch(x[:rows, :length])]
        tokens = count_tokens(method, batches)
        generator = torch.Generator(device).manual_seed(config.train.seed)
        return lambda: train_step(state, batches, tokens, config.anchor.until, generator)

    full_step, numbers = make_step(batch, config.length), count(1)

    def step() -> StepReport:
        report = full_step()
        if device.type == "cpu":
            progress.step(next(numbers))
        return report

    if device.type == "cpu":
        num_steps = 1 + WARM_UP_STEPS + steps + PROFILED_STEPS * profiled
        progress.begin(num_steps, num_steps * _estimate_seconds(make_step, batch, config.length))
    if config.train.recompute:  # torch would count the second forward pass too
        recompute_blocks(network)
        tflop = training_flops(method, network) * batch * config.length / 1e12
    else:
        tflop = count_flops(step) / 1e12
    if config.train.precision == "float8":
        use_float8(network)
    remark = compile_trunks(network) if compiled else ""
    for _ in range(WARM_UP_STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(_time_steps(step, steps, device))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    categories = _profile(step, device) if profiled else ()
    product = _product_flops(device)
    datasheet = datasheet_flops(device)
    return TrainingSpeed(
        device=device_name(device),
        tokens_a_step=batch * config.length,
        milliseconds=1e3 * seconds,
        tokens_per_second=batch * config.length / seconds,
        peak_gib=peak,
        tflop_a_step=tflop,
        product_tflops=product / 1e12,
        of_product=tflop * 1e12 / seconds / product,
        of_datasheet=None if datasheet is None else tflop * 1e12 / seconds / datasheet,
        compiled=compiled and not remark,
        remark=remark,
        profile=categories,
    )


def _estimate_seconds(make_step: Callable[[int, int], Step], batch: int, length: int) -> float:
    """Estimated seconds per step, from a step on part of a row, then on 8 rows if that takes less than a second."""
    seconds = 0.0
    for rows, tokens in ((1, min(length, 128)), (min(batch, 8), length)):
        if seconds < 1:
            start = time.perf_counter()
            make_step(rows, tokens)()
            seconds = time.perf_counter() - start
            estimate = seconds * batch * length / (rows * tokens)
    return estimate


def fresh_network(method: Method, device: torch.device) -> nn.Module:
    """A new network with random head weights: heads are initialized to zero, and zeros distort timings."""
    torch.manual_seed(method.config.train.seed)
    with device:
        network = method.build()
    for name, weight in network.named_parameters():
        if name.endswith("head.weight"):
            nn.init.normal_(weight, std=0.02)
    return network


def _time_steps(step: Step, steps: int, device: torch.device) -> list[float]:
    """Seconds of each step; on a GPU measured with CUDA events, without synchronizing between steps."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            step().check()
            times.append(time.perf_counter())
        return [end - start for start, end in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        report = step()
        event.record()
    report.check()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _product_flops(device: torch.device) -> float:
    """FLOP/s of one large square matrix product: bf16 on a GPU, float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[3:])


def _profile(step: Step, device: torch.device) -> tuple[tuple[str, float], ...]:
    """Milliseconds per step by kernel category, longest first; on a GPU including idle time."""
    steps, on_gpu = PROFILED_STEPS, device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    spent: dict[str, float] = defaultdict(float)
    events = [event for event in trace.events() or [] if not on_gpu or event.device_type.name == "CUDA"]
    events = [event for event in events if not event.name.startswith("Optimizer.")]  # labels, not kernels
    for event in events:
        matches = (kind for kind, parts in KERNEL_CATEGORIES.items() if any(part in event.name for part in parts))
        spent[next(matches, "other")] += (
            (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e3 / steps
        )
    if on_gpu:
        elapsed = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        spent["idle"] = elapsed / 1e3 / steps - sum(spent.values())
    return tuple(sorted(spent.items(), key=lambda row: -row[1]))


@dataclass(frozen=True)
class SamplingSpeed:
    """One measurement: a batch of B fully masked canvases of L tokens is sampled."""

    device: str
    dtype: str
    """Of the matrix products in the network."""
    graphs: bool
    """Whether CUDA graphs are used."""
    plain: bool
    """Whether the reference sampler and the training network were measured."""
    method: str
    sampler: str
    steps: int
    batch: int
    length: int
    network_calls: int
    """Of one sampling run."""
    seconds: float
    """Of one sampling run: the median."""
    seconds_per_sequence: float
    """`seconds` divided by the batch size."""
    milliseconds_a_call: float
    """Time of a run divided by its network calls; includes drawing tokens and everything else."""
    tokens_per_second: float
    peak_gib: float | None
    """Peak memory allocated on the GPU, including the weights; None on a CPU."""


class CountingNetwork(FrozenNetwork):
    """A frozen network that counts its calls."""

    calls = 0

    def hidden(
        self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None, memory: Tensor | None = None
    ) -> HiddenStates:
        self.calls += 1
        return super().hidden(z, sigma, pad, memory)

    def denoise(self, z: Tensor, anchors: AnchorStates, pad: Tensor | None = None) -> HiddenStates:
        self.calls += 1  # with stale anchors; the calls that also run the anchor network are among them
        return super().denoise(z, anchors, pad)

    def read_and(
        self, key: object, function: Callable[..., Result], ids: Tensor, cache: KVCache, *inputs: Tensor | None
    ) -> Result:
        self.calls += 1
        return super().read_and(key, function, ids, cache, *inputs)


def measure_sampling(
    lm: LanguageModel,
    sampling: Sampling,
    batch: int,
    length: int,
    repeats: int,
    plain: bool,
    progress: SpeedProgress,
    seed: int = 0,
) -> SamplingSpeed:
    """Time `repeats` identical sampling runs, after an untimed one that captures the CUDA graphs.

    `plain` measures the reference: the training network computes all logits and every step samples the full posterior;
    autoregressive methods recompute the whole prefix. In bf16 on a GPU, like the optimized form.
    """
    device = next(lm.network.parameters()).device
    canvas = torch.full((batch, length), lm.mask_id, device=device)
    check_canvas(lm.method, canvas, sampling)
    network = lm.network if plain else CountingNetwork(lm.network)
    plain_calls: list[None] = []
    if not isinstance(network, CountingNetwork):
        network.register_forward_hook(lambda *_: plain_calls.append(None))
    max_steps = length if lm.method.exact else sampling.steps  # a sampler may skip steps

    def sample_once(number: int) -> float:
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if plain and device.type == "cuda" else nullcontext():
            frames = _sample(lm, network, canvas, sampling, RowRng(seed, range(batch)), plain)
            if device.type == "cpu":
                frames = _reporting_frames(frames, progress, number * max_steps, (repeats + 1) * max_steps)
            last_frame(frames)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    sample_once(0)
    calls = network.calls if isinstance(network, CountingNetwork) else len(plain_calls)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(sample_once(number) for number in range(1, repeats + 1))
    plain_dtype = torch.bfloat16 if device.type == "cuda" else next(lm.network.parameters()).dtype
    return SamplingSpeed(
        device=device_name(device),
        dtype=str(network.dtype if isinstance(network, FrozenNetwork) else plain_dtype).removeprefix("torch."),
        graphs=isinstance(network, FrozenNetwork) and network.graph_cache is not None,
        plain=plain,
        method=lm.config.method,
        sampler=sampling.sampler,
        steps=sampling.steps,
        batch=batch,
        length=length,
        network_calls=calls,
        seconds=seconds,
        seconds_per_sequence=seconds / batch,
        milliseconds_a_call=1e3 * seconds / calls,
        tokens_per_second=batch * length / seconds,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    )


def _reporting_frames(
    frames: Iterator[Frame], progress: SpeedProgress, num_done: int, total_steps: int
) -> Iterator[Frame]:
    """The same frames, with progress reports; the first step of the first run gives the estimate of the total time."""
    start = time.perf_counter()
    for number, frame in enumerate(frames):
        if number == 1 and num_done == 0:
            progress.begin(total_steps, total_steps * (time.perf_counter() - start))
        if number:
            progress.step(num_done + number)
        yield frame


def _sample(
    lm: LanguageModel,
    network: nn.Module | FrozenNetwork,
    canvas: Tensor,
    sampling: Sampling,
    rng: RowRng,
    plain: bool,
) -> Iterator[Frame]:
    method = lm.method
    samples_by_scores = sampling.sampler == "analytic" and not method.any_order
    if not plain or method.samplers is not None or samples_by_scores:  # these have no other form than the reference
        return method.generate(network, canvas, sampling, rng)
    if sampler_of(sampling).sample not in (sample_positions_first, sample_analytic):
        raise UserError(
            f"--plain samples the full posterior at every step, which sampling.sampler {sampling.sampler} does not "
            "have; try ancestral"
        )
    if sampling.anchor_every > 1:
        raise UserError(
            f"--plain runs both networks at every step, and sampling.anchor_every is {sampling.anchor_every}; use 1"
        )
    if lm.config.model.memory:
        raise UserError("--plain has no memory of the step before, and model.memory is true; leave --plain out")
    run = cast(MaskedDiffusion, method).sampling_run(network, canvas, sampling, rng, None)
    logits = logits_everywhere(network, method.conditioning_sigma, None)

    def beliefs(z: Tensor, alpha: Tensor) -> Tensor:
        return subs(logits(z, alpha), z, lm.mask_id)

    return sample_reference(run, reference_transition(beliefs, lm.mask_id, run.steps, sampling), beliefs)
