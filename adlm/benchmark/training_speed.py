"""How fast a training step is, and where its time goes. Knows no data: its tokens are drawn by Zipf's law.

Shapes: B sequences, L tokens.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from adlm.config.schema import Config
from adlm.distributed import device_name
from adlm.methods import method_of
from adlm.methods.method import Method
from adlm.training.compilation import compile_trunks
from adlm.training.ema import EMA
from adlm.training.optimizer import build_optimizer
from adlm.training.step import MicroBatch, StepReport, count_tokens, train_step
from adlm.training.throughput import DATASHEET, count_flops, zipf

WARM_UP = 5
PROFILED = 3

# Where a kernel belongs, by the first of these that its name holds.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitKreduce", "gemv", "addmm", "::mm", "::bmm", "linear"),
    "cross-entropy": ("logit_gradients_kernel", "logsumexp"),
    "optimiser, norm and average": ("multi_tensor_apply", "_fused_adamw", "lerp"),
    "fused elementwise": ("triton_",),
}


@dataclass(frozen=True)
class TrainingSpeed:
    """One measurement: the whole step, noise to average."""

    device: str
    tokens_a_step: int
    milliseconds: float
    """Of a step: the median."""
    tokens_per_second: float
    peak_gib: float | None
    """Most memory ever held at once on the device."""
    tflop_a_step: float
    """Matrix products and attention that the step runs, forth and back, as torch counts them, in 10^12 operations."""
    product_tflops: float
    """What one large matrix product reaches here, in the precision of the step."""
    of_product: float
    """The step's operations a second as a share of that."""
    of_datasheet: float | None
    """The same as a share of the maker's figure, where we know it: what is usually called MFU."""
    compiled: bool
    remark: str
    """Why it is not compiled, where that was wanted."""
    profile: tuple[tuple[str, float], ...] = ()
    """Milliseconds a step by kind of work, if asked for."""


class SpeedProgress(Protocol):
    """Who waits for a measurement."""

    def begin(self, steps: int, seconds: float) -> None:
        """So many steps follow, and take about so long. On a GPU nobody is told: that is over in a moment."""
        ...

    def step(self, done: int) -> None: ...


def measure_training(
    config: Config, batch: int, steps: int, compiled: bool, device: torch.device, profiled: bool, watch: SpeedProgress
) -> TrainingSpeed:
    """Steps on one drawn batch, over and over, after a warm-up."""
    step_on, network = _prepare(config, batch, device)
    num_steps = 1 + WARM_UP + steps + PROFILED * profiled
    step = step_on(batch, config.length)
    if device.type == "cpu":
        watch.begin(num_steps, num_steps * _estimate(step_on, batch, config.length))
        step = _counted(step, watch)
    tflop = count_flops(step) / 1e12
    remark = compile_trunks(network) if compiled else ""
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(_timed(step, steps, device))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    table = _where(step, device) if profiled else ()
    product = _product(device)
    name = device_name(device)
    datasheet = next((rate for part, rate in DATASHEET.items() if part in name), None)
    return TrainingSpeed(
        device=name,
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
        profile=table,
    )


Step = Callable[[], StepReport]


def _prepare(config: Config, batch: int, device: torch.device) -> tuple[Callable[[int, int], Step], nn.Module]:
    """A step on the first so many rows, and tokens of each, of one drawn batch; and the network that it trains."""
    method = method_of(config)
    network = fresh_network(method, device).train()
    optimizer = build_optimizer(network, config.train)
    average = EMA(network, config.train.ema) if config.train.ema > 0 else None
    x = zipf(config, batch, torch.Generator().manual_seed(config.train.seed))
    lowered = torch.bfloat16 if device.type == "cuda" else None

    def step_on(rows: int, length: int) -> Step:
        batches = [MicroBatch(x[:rows, :length])]
        tokens = count_tokens(method, batches)
        draws = torch.Generator(device).manual_seed(config.train.seed)
        return lambda: train_step(method, network, optimizer, average, batches, tokens, 1.0, draws, lowered)

    return step_on, network


def _estimate(step_on: Callable[[int, int], Step], batch: int, length: int) -> float:
    """About how many seconds a step takes, by one on part of a row, or on 8 rows where that is quick."""
    seconds = 0.0
    for rows, tokens in ((1, min(length, 128)), (min(batch, 8), length)):
        if seconds < 1:
            start = time.perf_counter()
            step_on(rows, tokens)()
            seconds = time.perf_counter() - start
            whole = seconds * batch * length / (rows * tokens)
    return whole


def _counted(step: Step, watch: SpeedProgress) -> Step:
    """The same step, and every one that is done is told."""
    numbers = count(1)

    def counted() -> StepReport:
        report = step()
        watch.step(next(numbers))
        return report

    return counted


def fresh_network(method: Method, device: torch.device) -> nn.Module:
    """A new network whose heads say something: they start at zero, and no product is timed on zeros."""
    torch.manual_seed(method.config.train.seed)
    with device:
        network = method.build()
    for name, weight in network.named_parameters():
        if name.endswith("head.weight"):
            nn.init.normal_(weight, std=0.02)
    return network


def _timed(step: Callable[[], StepReport], steps: int, device: torch.device) -> list[float]:
    """Seconds of each step; on a GPU by its own clock, without waiting between steps."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(steps):
            step().check()
            moments.append(time.perf_counter())
        return [end - start for start, end in pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        report = step()
        event.record()
    report.check()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _product(device: torch.device) -> float:
    """Operations a second of one large square product, in bf16 on a GPU."""
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


def _where(step: Callable[[], StepReport], device: torch.device) -> tuple[tuple[str, float], ...]:
    """Milliseconds a step by kind of work, longest first; on a GPU with the time it stood idle."""
    steps, on_gpu = PROFILED, device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    spent: dict[str, float] = defaultdict(float)
    events = [event for event in trace.events() or [] if not on_gpu or event.device_type.name == "CUDA"]
    events = [event for event in events if not event.name.startswith("Optimizer.")]  # a label around kernels, no kernel
    for event in events:
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.name for part in parts)), "other")
        spent[kind] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e3 / steps
    if on_gpu:
        whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        spent["idle"] = whole / 1e3 / steps - sum(spent.values())
    return tuple(sorted(spent.items(), key=lambda row: -row[1]))
