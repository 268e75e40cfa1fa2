"""`adlm bench`: measure the training or sampling speed of this machine."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from adlm.apps.bench.sampling_speed import SamplingSpeed, measure_sampling
from adlm.apps.bench.training_speed import TrainingSpeed, fresh_network, measure_training
from adlm.cli.console import Console, Progress, duration
from adlm.config.load import preset_titles, resolve
from adlm.config.schema import Config, Sampling, Vocabulary
from adlm.distributed import default_threads, device_of
from adlm.errors import UserError
from adlm.hub import is_hub_name
from adlm.language_model import LanguageModel, load
from adlm.limits import check_network, check_sampling, check_training
from adlm.methods import method_of
from adlm.sampling.request import parse_sampling
from adlm.tokens import bpe_size, load_tokenizer
from adlm.training.build import should_compile

# A benchmark on random tokens needs only the vocabulary, not the tokenizer. These two are the presets'.
KNOWN_VOCABULARIES = {"gpt2": Vocabulary(50_258, 50_257, 50_256), "bert-base-uncased": Vocabulary(30_522, 103, 101)}


def run(arguments: argparse.Namespace) -> int:
    for name in ("batch", "steps", "repeats", "length"):
        number = vars(arguments).get(name)
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    return {"train": _train, "sample": _sample}[arguments.benchmark](arguments)


class BenchmarkProgress:
    """Progress of a benchmark on standard error: first the expected duration, then the number of steps done."""

    def __init__(self, device: torch.device) -> None:
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        if device.type == "cpu":
            self.console.print("timing a small step to estimate the duration", style="yellow")

    def begin(self, steps: int, seconds: float) -> None:
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


def _train(arguments: argparse.Namespace) -> int:
    config, device = _with_vocabulary(resolve(arguments.overrides)), _device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads or default_threads())
    compiled = should_compile(config.train, device) if arguments.compile is None else arguments.compile
    train_config = dataclasses.replace(config.train, batch_size=arguments.batch, micro_batch=None, shard=1, samples=1)
    check_training(dataclasses.replace(config, train=train_config), device, batch_option="--batch")
    with BenchmarkProgress(device) as progress:
        speed = measure_training(
            config, arguments.batch, arguments.steps, compiled, device, arguments.profile, progress
        )
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(speed))}\n" if arguments.json else _format_training_speed(speed))
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(default_threads())
    lm, sampling = _load_or_initialize(arguments.overrides, device)
    length = arguments.length or lm.config.length
    check_sampling(lm.config, arguments.batch, length, device, "--batch")
    try:
        with BenchmarkProgress(device) as progress:
            speed = measure_sampling(
                lm, sampling, arguments.batch, length, arguments.repeats, arguments.plain, progress
            )
    except torch.OutOfMemoryError:
        raise UserError(f"--batch {arguments.batch} does not fit in the device memory; try a smaller one") from None
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(speed))}\n" if arguments.json else _format_sampling_speed(speed))
    return 0


def _load_or_initialize(overrides: list[str], device: torch.device) -> tuple[LanguageModel, Sampling]:
    """A saved model, or a preset's network with random weights."""
    first, preset_folders = overrides[0], {name.partition("/")[0] for name in preset_titles()}
    is_on_hub = is_hub_name(first) and first.partition("/")[0] not in preset_folders
    if Path(first).is_dir() or first.endswith(".ckpt") or is_on_hub:
        lm = load(first, str(device))
        return lm, lm.sampling(**parse_sampling(overrides[1:]))
    config = _with_vocabulary(resolve(overrides))
    check_network(config, device)
    method = method_of(config)
    network = fresh_network(method, device).eval().requires_grad_(False)
    return LanguageModel(method.config, method, network), method.config.sampling


def _with_vocabulary(config: Config) -> Config:
    if config.vocabulary is not None:
        return config
    size = bpe_size(config.tokenizer)
    trained = None if size is None else Vocabulary(size, size - 1, 0, 0, 0)  # the ids that `train_bpe` assigns
    vocabulary = KNOWN_VOCABULARIES.get(config.tokenizer) or trained or load_tokenizer(config.tokenizer).vocabulary
    return dataclasses.replace(config, vocabulary=vocabulary)


def _device(name: str | None) -> torch.device:
    if name not in (None, "cuda", "cpu"):
        raise UserError(f"--device {name} is not supported by adlm bench; use cuda or cpu")
    return device_of(name or "auto", "--device")


def _format_training_speed(speed: TrainingSpeed) -> str:
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
    return "\n".join(lines) + "\n"


def _format_sampling_speed(speed: SamplingSpeed) -> str:
    mode = "plain" if speed.plain else "CUDA graphs" if speed.graphs else "no CUDA graphs"
    lines = [
        f"{speed.seconds_per_sequence:,.3g} s per sequence of {speed.length:,} tokens, {speed.tokens_per_second:,.0f} "
        f"tokens/s, batch size {speed.batch}",
        f"{speed.network_calls:,} network calls of {speed.milliseconds_a_call:,.3g} ms, including sampling",
        f"{speed.method} with {speed.sampler}, {speed.steps:,} steps, on {speed.device} in {speed.dtype}, {mode}",
        *_format_memory(speed.peak_gib),
    ]
    return "\n".join(lines) + "\n"


def _format_memory(peak_gib: float | None) -> list[str]:
    return [] if peak_gib is None else [f"{peak_gib:.1f} GiB peak memory"]
