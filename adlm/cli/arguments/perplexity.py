"""The arguments of `adlm perplexity`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from adlm.config.schema import PackingName
from adlm.likelihood.names import AUTO, BATCH_TOKENS, BATCH_TOKENS_ON_GPU, ESTIMATOR_LINES, ZERO_SHOT

EXAMPLE = """adlm perplexity --data speech.txt --max-tokens 20000
  adlm perplexity runs/quickstart/adlm runs/quickstart/mdlm --data speech.txt
  adlm perplexity model.ckpt --tokenizer gpt2 --data zero-shot --samples 8 --out zero-shot.json
  torchrun --nproc-per-node 8 -m adlm perplexity runs/own --data wikitext2 ptb --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="*",
        default=["box"],
        metavar="MODEL",
        help="a model folder, run folder, owner/name on the hub, or .ckpt file (with --tokenizer)\n"
        "(default: box, the small model that comes with adlm)",
    )
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="DATA",
        help="corpus names (adlm prepare --list), files, folders of texts, globs in quotes, prepared folders,\n"
        f"or zero-shot: the paper's seven corpora ({', '.join(ZERO_SHOT)})",
    )
    add(
        "--estimator",
        default=AUTO,
        metavar="NAME",
        help="auto: any-order where it is valid, else nelbo (default)\n"
        + "\n".join(f"{name}: {line}" for name, line in ESTIMATOR_LINES.items()).replace("%", "%%"),
    )
    add("--split", default="", metavar="S", help="train, valid or test (default: as published, else valid)")
    add_measurement_options(add, "packed-published for zero-shot, else that of the text")
    add("--out", metavar="FILE", type=Path, help="write the results as JSON; rerun the same command to resume")
    add("--force", action="store_true", help="replace a file that adlm did not write")
    add("--json", action="store_true", help="print JSON")


def add_measurement_options(add: Callable[..., Any], default_packing: str) -> None:
    """The options that `adlm reproduce` shares."""
    add("--packing", default="", metavar="P", help=f"{', '.join(get_args(PackingName))}\n(default: {default_packing})")
    add("--samples", type=int, default=4, metavar="K", help="independent Monte Carlo replicates (default: 4)")
    add("--max-tokens", type=int, metavar="N", help="measure about N tokens, spread evenly over each text")
    add("--tokenizer", metavar="T", help="tokenizer name, file or folder, for a model that has none")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the random numbers, the same for every model (default: 0)",
    )
    add(
        "--batch",
        type=int,
        metavar="B",
        help=f"rows per batch (default: {BATCH_TOKENS:,} tokens, {BATCH_TOKENS_ON_GPU:,} on a GPU);\n"
        "does not change the results",
    )
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto)")
