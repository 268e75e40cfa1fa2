"""`adlm bench`: how fast this machine trains a preset, or samples."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from adlm.benchmark.sampling_speed import SamplingSpeed, measure_sampling
from adlm.benchmark.training_speed import TrainingSpeed, fresh_network, measure_training
from adlm.cli.console import Console, Progress, duration
from adlm.config.load import resolve
from adlm.config.schema import Config, Sampling, Vocabulary
from adlm.errors import UserError
from adlm.evaluation.generation.draw_samples import sampling_config
from adlm.language_model import LanguageModel, load
from adlm.limits import check_network, check_sampling, check_training
from adlm.methods import method_of
from adlm.tokens import bpe_size, load_tokenizer
from adlm.training.sharding import default_threads

TRAIN = "adlm bench train owt/adlm --batch 32 --profile"
SAMPLE = """adlm bench sample owt/adlm --batch 1 sampling.steps=1024
  adlm bench sample runs/own --batch 16 --plain"""
EXAMPLE = f"{TRAIN}\n  {SAMPLE}"

# Drawn tokens need no tokenizer, only its size; these two are those of the presets.
SIZES = {"gpt2": Vocabulary(50_258, 50_257, 50_256), "bert-base-uncased": Vocabulary(30_522, 103, 101)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    train = _measuring(what, "train", "the whole training step: noise, loss, gradient, clip, AdamW, average", TRAIN)
    train.add_argument(
        "words", nargs="+", metavar="WORD", help="a preset or .yaml file, section=preset, or knob=value, as for train"
    )
    train.add_argument("--batch", type=int, default=32, metavar="B", help="sequences a step (32)")
    train.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are timed, after a warm-up (20)")
    help_compile = "compile the networks, or not (as train.compile says)"
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, help=help_compile)
    train.add_argument("--profile", action="store_true", help="add a table of where the time goes")
    train.set_defaults(measure_training=_train)
    sample = _measuring(what, "sample", "whole walks from masks to text: time, network calls, memory", SAMPLE)
    sample.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="a model folder, run or .ckpt, then sampling.knob=value; or, for a fresh\n"
        "network of no sense, a preset or .yaml file and knob=value, as for train",
    )
    sample.add_argument("--batch", type=int, default=1, metavar="B", help="sequences side by side (1)")
    sample.add_argument("--length", type=int, metavar="L", help="tokens of each (the model's length)")
    sample.add_argument("--repeats", type=int, default=3, metavar="N", help="walks that are timed, after one more (3)")
    sample.add_argument(
        "--plain", action="store_true", help="the full posterior at every step; left to right, no cache"
    )
    sample.set_defaults(measure_training=_sample)


def _measuring(
    what: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, line: str, example: str
) -> argparse.ArgumentParser:
    """The arguments that both have."""
    parser = what.add_parser(
        name,
        help=line,
        description=f"{line[0].upper()}{line[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--device", metavar="D", help="cuda or cpu (cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def run(arguments: argparse.Namespace) -> int:
    for name in ("batch", "steps", "repeats", "length"):
        number = vars(arguments).get(name)
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    return int(arguments.measure(arguments))


class Waiting:
    """The console of a measurement: about how long it takes, then how far it is."""

    def __init__(self, device: torch.device) -> None:
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        if device.type == "cpu":
            self.console.print("timing a small step first", style="yellow")

    def begin(self, steps: int, seconds: float) -> None:
        threads = torch.get_num_threads()
        on = f"this CPU with {threads} thread{'s' if threads > 1 else ''}"
        self.console.print(f"about {duration(seconds)} on {on}", style="yellow")
        self.progress = Progress(self.console, "measuring", steps)

    def step(self, done: int) -> None:
        assert self.progress is not None
        self.progress.update(done)

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *problem: object) -> None:
        if self.progress is not None:
            self.progress.close()


def _train(arguments: argparse.Namespace) -> int:
    config, device = _with_vocabulary(resolve(arguments.words)), _device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads or default_threads())
    usual = config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")
    compiled = usual if arguments.compile is None else arguments.compile
    given = dataclasses.replace(config.train, batch_size=arguments.batch, micro_batch=None, shard=1, samples=1)
    check_training(dataclasses.replace(config, train=given), device, batch_option="--batch")
    with Waiting(device) as watch:
        speed = measure_training(config, arguments.batch, arguments.steps, compiled, device, arguments.profile, watch)
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(speed))}\n" if arguments.json else _told(speed))
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(default_threads())
    lm, sampling = _model(arguments.words, device)
    length = arguments.length or lm.config.length
    check_sampling(lm.config, arguments.batch, length, device, "--batch")
    try:
        with Waiting(device) as watch:
            speed = measure_sampling(lm, sampling, arguments.batch, length, arguments.repeats, arguments.plain, watch)
    except torch.OutOfMemoryError:
        raise UserError(f"--batch {arguments.batch} does not fit the memory of the device; try fewer") from None
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(speed))}\n" if arguments.json else _told_sampling(speed))
    return 0


def _model(words: list[str], device: torch.device) -> tuple[LanguageModel, Sampling]:
    """A model there is, or a preset's network as it is drawn."""
    if Path(words[0]).is_dir() or words[0].endswith(".ckpt"):
        lm = load(words[0], str(device))
        return lm, sampling_config(lm, words[1:])
    config = _with_vocabulary(resolve(words))
    check_network(config, device)
    method = method_of(config)
    network = fresh_network(method, device).eval().requires_grad_(False)
    return LanguageModel(method.config, method, network), method.config.sampling


def _with_vocabulary(config: Config) -> Config:
    if config.vocabulary is not None:
        return config
    size = bpe_size(config.tokenizer)
    learnt = None if size is None else Vocabulary(size, size - 1, 0, 0, 0)  # as `train_bpe` gives them out
    vocabulary = SIZES.get(config.tokenizer) or learnt or load_tokenizer(config.tokenizer).vocabulary
    return dataclasses.replace(config, vocabulary=vocabulary)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise UserError(f"--device {name} is not one that is measured; use cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use cpu")
    return torch.device(name)


def _told(speed: TrainingSpeed) -> str:
    share = f"{speed.of_product:.1%} of the {speed.product_tflops:,.3g} TFLOP/s that one large product reaches here"
    if speed.of_datasheet is not None:
        share += f"; MFU {speed.of_datasheet:.1%} of the maker's figure"
    how = "compiled" if speed.compiled else "not compiled"
    lines = [
        f"{speed.tokens_per_second:,.0f} tokens/s on {speed.device}, {how}",
        f"{speed.milliseconds:,.1f} ms a step of {speed.tokens_a_step:,} tokens, the median",
        f"{speed.tflop_a_step:,.3g} TFLOP a step: {share}",
        *_memory(speed.peak_gib),
    ]
    if speed.remark:
        lines.append(speed.remark)
    whole = sum(spent for _, spent in speed.profile)
    lines += [f"  {spent:9.2f} ms {spent / whole:6.1%}  {kind}" for kind, spent in speed.profile]
    return "\n".join(lines) + "\n"


def _told_sampling(speed: SamplingSpeed) -> str:
    how = "plain" if speed.plain else "CUDA graphs" if speed.graphs else "no CUDA graphs"
    lines = [
        f"{speed.seconds_per_sequence:,.3g} s a sequence of {speed.length:,} tokens, {speed.tokens_per_second:,.0f} "
        f"tokens/s, {speed.batch} side by side",
        f"{speed.network_calls:,} network calls of {speed.milliseconds_a_call:,.3g} ms, drawing included",
        f"{speed.method} by {speed.sampler}, {speed.steps:,} steps, on {speed.device} in {speed.dtype}, {how}",
        *_memory(speed.peak_gib),
    ]
    return "\n".join(lines) + "\n"


def _memory(peak_gib: float | None) -> list[str]:
    return [] if peak_gib is None else [f"{peak_gib:.1f} GiB at the most"]
