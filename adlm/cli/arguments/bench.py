"""The arguments of `adlm bench`."""

import argparse

from adlm.cli.arguments import add_subcommand

TRAIN = "adlm bench train owt/adlm --batch 32 --profile"
SAMPLE = """adlm bench sample owt/adlm --batch 1 sampling.steps=1024
  adlm bench sample runs/own --batch 16 --plain"""
EXAMPLE = f"{TRAIN}\n  {SAMPLE}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    train = _add_benchmark(
        subparsers, "train", "measure the full training step: noise, loss, gradient, clipping, AdamW, EMA", TRAIN
    )
    train.add_argument(
        "overrides",
        nargs="+",
        metavar="OVERRIDE",
        help="a preset or .yaml file, section=preset, or option=value, as for `adlm train`",
    )
    train.add_argument("--batch", type=int, default=32, metavar="B", help="sequences per step (default: 32)")
    train.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps, after a warm-up (default: 20)")
    help_compile = "whether to compile the networks (default: train.compile)"
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, help=help_compile)
    train.add_argument("--profile", action="store_true", help="also print a table of time per kind of operation")
    sample = _add_benchmark(subparsers, "sample", "measure complete sampling runs: time, network calls, memory", SAMPLE)
    sample.add_argument(
        "overrides",
        nargs="+",
        metavar="OVERRIDE",
        help="a model folder, run folder, owner/name on the hub or .ckpt file, then sampling.option=value;\n"
        "or, for a randomly initialized network, a preset or .yaml file and option=value, as for `adlm train`",
    )
    sample.add_argument("--batch", type=int, default=1, metavar="B", help="sequences per batch (default: 1)")
    sample.add_argument("--length", type=int, metavar="L", help="tokens per sequence (default: the model's length)")
    sample.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed sampling runs, after one warm-up run (default: 3)"
    )
    sample.add_argument(
        "--plain",
        action="store_true",
        help="sample the full posterior at every step; for autoregressive methods, no KV cache",
    )


def _add_benchmark(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, line: str, example: str
) -> argparse.ArgumentParser:
    """A subcommand with the arguments that both benchmarks share."""
    parser = add_subcommand(subparsers, name, line, example)
    parser.add_argument("--device", metavar="D", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
