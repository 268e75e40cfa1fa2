"""`adlm bench`: how fast this machine trains a preset."""

import argparse
import dataclasses
import json
import sys

import torch

from adlm.config.load import resolve
from adlm.config.schema import Config, Vocabulary
from adlm.errors import UserError
from adlm.tokens import load_tokenizer
from adlm.training.speed import Speed, measure

EXAMPLE = "adlm bench train owt/adlm --batch 32 --profile"

# Drawn tokens need no tokenizer, only its size; these two are those of the presets.
SIZES = {"gpt2": Vocabulary(50_258, 50_257), "bert-base-uncased": Vocabulary(30_522, 103)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=["train"], help="the whole training step: noise, loss, gradient, clip, AdamW, average"
    )
    parser.add_argument(
        "words", nargs="+", metavar="WORD", help="a preset or .yaml file, section=preset, or knob=value, as for train"
    )
    parser.add_argument("--batch", type=int, default=32, metavar="B", help="sequences a step (32)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are timed, after a warm-up (20)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the networks")
    parser.add_argument("--device", metavar="D", help="cuda or cpu (cuda where there is one)")
    parser.add_argument("--profile", action="store_true", help="add a table of where the time goes")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    for name in ("batch", "steps"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)} must be at least 1")
    speed = measure(
        _with_vocabulary(resolve(arguments.words)),
        arguments.batch,
        arguments.steps,
        arguments.compile,
        _device(arguments.device),
        arguments.profile,
    )
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(speed))}\n" if arguments.json else _told(speed))
    return 0


def _with_vocabulary(config: Config) -> Config:
    if config.vocabulary is not None:
        return config
    vocabulary = SIZES.get(config.tokenizer) or load_tokenizer(config.tokenizer).vocabulary
    return dataclasses.replace(config, vocabulary=vocabulary)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise UserError(f"--device {name} is not one that is measured; use cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use cpu")
    return torch.device(name)


def _told(speed: Speed) -> str:
    share = f"{speed.of_product:.1%} of the {speed.product_tflops:,.3g} TFLOP/s that one large product reaches here"
    if speed.of_datasheet is not None:
        share += f"; MFU {speed.of_datasheet:.1%} of the maker's figure"
    how = "compiled" if speed.compiled else "not compiled"
    lines = [
        f"{speed.tokens_per_second:,.0f} tokens/s on {speed.device}, {how}",
        f"{speed.milliseconds:,.1f} ms a step of {speed.tokens_a_step:,} tokens, the median",
        f"{speed.tflop_a_step:,.3g} TFLOP a step: {share}",
    ]
    if speed.peak_gib is not None:
        lines.append(f"{speed.peak_gib:.1f} GiB at the most")
    if speed.remark:
        lines.append(speed.remark)
    whole = sum(spent for _, spent in speed.profile)
    lines += [f"  {spent:9.2f} ms {spent / whole:6.1%}  {kind}" for kind, spent in speed.profile]
    return "\n".join(lines) + "\n"
