"""`adlm bench`: measure the training or sampling speed of this machine."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adlm.cli.console import Console, Progress, duration
from adlm.config.load import preset_titles, resolve
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.hub import is_hub_name
from adlm.request import Request, option
from adlm.sampling.settings import parse_sampling

if TYPE_CHECKING:  # importing torch takes seconds
    import torch

    from adlm.apps.bench import SamplingSpeed, TrainingSpeed


@dataclass(frozen=True)
class BenchRequest(Request):
    """The options that both benchmarks have."""

    device: str | None = option("cuda or cpu (default: cuda if available)", None)
    json: bool = option("print JSON", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in (None, "cuda", "cpu"):
            raise UserError(f"--device {self.device} is not supported by adlm bench; use cuda or cpu")


@dataclass(frozen=True)
class BenchTrainRequest(BenchRequest):
    """Measure the full training step: noise, loss, gradient, clipping, AdamW, EMA."""

    action = "train"
    example = "adlm bench train owt/adlm --batch 32 --profile"

    overrides: tuple[str, ...] = option(
        "a preset or .yaml file, section=preset, or option=value, as for `adlm train`", positional=True
    )
    batch: int = option("sequences per step", 32, minimum=1)
    steps: int = option("timed steps, after a warm-up", 20, minimum=1)
    compile: bool | None = option("whether to compile the networks (default: train.compile)", None)
    profile: bool = option("also print a table of time per kind of operation", False)


@dataclass(frozen=True)
class BenchSampleRequest(BenchRequest):
    """Measure complete sampling runs: time, network calls, memory."""

    action = "sample"
    example = """adlm bench sample owt/adlm --batch 1 sampling.steps=1024
  adlm bench sample runs/own --batch 16 --plain"""

    overrides: tuple[str, ...] = option(
        "a model folder, run folder, owner/name on the hub or .ckpt file, then sampling.option=value;\n"
        "or, for a randomly initialized network, a preset or .yaml file and option=value, as for `adlm train`",
        positional=True,
    )
    batch: int = option("sequences per batch", 1, minimum=1)
    length: int | None = option("tokens per sequence (default: the model's length)", None, minimum=1)
    repeats: int = option("timed sampling runs, after one warm-up run", 3, minimum=1)
    plain: bool = option("sample the full posterior at every step; for autoregressive methods, no KV cache", False)


def run(request: BenchTrainRequest | BenchSampleRequest) -> int:
    text = _train(request) if isinstance(request, BenchTrainRequest) else _sample(request)
    sys.stdout.write(f"{text}\n")
    return 0


class BenchmarkProgress:
    """Progress of a benchmark on standard error: first the expected duration, then the number of steps done."""

    def __init__(self, device: "torch.device") -> None:
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        if device.type == "cpu":
            self.console.print("timing a small step to estimate the duration", style="yellow")

    def begin(self, steps: int, seconds: float) -> None:
        import torch

        threads = torch.get_num_threads()
        cpu = f"this CPU with {threads} thread{'s' if threads > 1 else ''}"
        self.console.print(f"about {duration(seconds)} on {cpu}", style="yellow")
        self.progress = Progress(self.console, "measuring", steps)

    def step(self, done: int) -> None:
        assert self.progress is not None
        self.progress.update(done)

    def __enter__(self) -> "BenchmarkProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.progress is not None:
            self.progress.close()


def _train(request: BenchTrainRequest) -> str:
    config = resolve(request.overrides)
    import torch

    from adlm.apps.bench import measure_training
    from adlm.distributed import default_threads, device_of
    from adlm.limits import check_training
    from adlm.tokens import with_vocabulary
    from adlm.training.build import check_precision, should_compile

    config = with_vocabulary(config)
    device = device_of(request.device or "auto", "--device")
    check_precision(config, device)
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads or default_threads())
    compiled = should_compile(config.train, device) if request.compile is None else request.compile
    train_config = replace(config.train, batch_size=request.batch, micro_batch=None, shard=1, samples=1)
    check_training(replace(config, train=train_config), device, batch_option="--batch")
    with BenchmarkProgress(device) as progress:
        speed = measure_training(config, request.batch, request.steps, compiled, device, request.profile, progress)
    return json.dumps(asdict(speed)) if request.json else _format_training_speed(speed)


def _sample(request: BenchSampleRequest) -> str:
    config = _config_of_preset(request.overrides)
    import torch

    from adlm.apps.bench import fresh_network, measure_sampling
    from adlm.distributed import default_threads, device_of
    from adlm.language_model import LanguageModel, load
    from adlm.limits import check_network, check_sampling
    from adlm.methods import method_of

    device = device_of(request.device or "auto", "--device")
    if device.type == "cpu":
        torch.set_num_threads(default_threads())
    if config is None:
        lm = load(request.overrides[0], str(device))
        sampling = lm.sampling(**parse_sampling(request.overrides[1:]))
    else:
        check_network(config, device)
        method = method_of(config)
        lm = LanguageModel(config, method, fresh_network(method, device).eval().requires_grad_(False))
        sampling = config.sampling
    length = request.length or lm.config.length
    check_sampling(lm.config, request.batch, length, device, "--batch")
    try:
        with BenchmarkProgress(device) as progress:
            speed = measure_sampling(lm, sampling, request.batch, length, request.repeats, request.plain, progress)
    except torch.OutOfMemoryError:
        raise UserError(f"--batch {request.batch} does not fit in the device memory; try a smaller one") from None
    return json.dumps(asdict(speed)) if request.json else _format_sampling_speed(speed)


def _config_of_preset(overrides: Sequence[str]) -> Config | None:
    """The config of a preset with overrides, whose network gets random weights; None for a saved model."""
    first, preset_folders = overrides[0], {name.partition("/")[0] for name in preset_titles()}
    is_on_hub = is_hub_name(first) and first.partition("/")[0] not in preset_folders
    if Path(first).is_dir() or first.endswith(".ckpt") or is_on_hub:
        return None
    from adlm.tokens import with_vocabulary

    return with_vocabulary(resolve(overrides))


def _format_training_speed(speed: "TrainingSpeed") -> str:
    share = (
        f"{speed.of_product:.1%} of the {speed.product_tflops:,.3g} TFLOP/s measured here for one large matrix product"
    )
    if speed.of_datasheet is not None:
        share += f"; MFU {speed.of_datasheet:.1%} of the datasheet peak"
    mode = "compiled" if speed.compiled else "not compiled"
    lines = [
        f"{speed.tokens_per_second:,.0f} tokens/s on {speed.device}, {mode}",
        f"{speed.milliseconds:,.1f} ms per step of {speed.tokens_a_step:,} tokens (median)",
        f"{speed.tflop_a_step:,.3g} TFLOP per step: {share}",
        *_format_memory(speed.peak_gib),
    ]
    if speed.remark:
        lines.append(speed.remark)
    total = sum(milliseconds for _, milliseconds in speed.profile)
    lines += [f"  {milliseconds:9.2f} ms {milliseconds / total:6.1%}  {kind}" for kind, milliseconds in speed.profile]
    return "\n".join(lines)


def _format_sampling_speed(speed: "SamplingSpeed") -> str:
    mode = "plain" if speed.plain else "CUDA graphs" if speed.graphs else "no CUDA graphs"
    lines = [
        f"{speed.seconds_per_sequence:,.3g} s per sequence of {speed.length:,} tokens, {speed.tokens_per_second:,.0f} "
        f"tokens/s, batch size {speed.batch}",
        f"{speed.network_calls:,} network calls of {speed.milliseconds_a_call:,.3g} ms, including sampling",
        f"{speed.method} with {speed.sampler}, {speed.steps:,} steps, on {speed.device} in {speed.dtype}, {mode}",
        *_format_memory(speed.peak_gib),
    ]
    return "\n".join(lines)


def _format_memory(peak_gib: float | None) -> list[str]:
    return [] if peak_gib is None else [f"{peak_gib:.1f} GiB peak memory"]
