"""The arguments of `adlm judge`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adlm.apps.judge.request import EOS, METRICS, START

EXAMPLE = """adlm judge samples.jsonl --reference prepared/owt --out cards/adlm-1024.json
  adlm judge samples.jsonl --model runs/judge --reference prepared/own --features minilm --out cards/own.json
  adlm judge samples.jsonl --metrics entropy,diversity
  adlm judge --plot cards/*.json --out cards.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "samples",
        nargs="*",
        metavar="SAMPLES",
        type=Path,
        help="a file written by `adlm sample --out`; with --plot, cards",
    )
    add(
        "--metrics",
        default=",".join(METRICS),
        metavar="LIST",
        help=f"comma-separated subset of {','.join(METRICS)} (default: all)",
    )
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the card; expensive intermediate results are cached next to it in judged/.\n"
        "with --plot, the plot file",
    )
    add("--force", action="store_true", help="replace a file that adlm did not write")
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto, a GPU if available)")
    add("--batch", type=int, metavar="B", help="texts per batch (default: 4, on a GPU 16); does not change the results")
    add("--json", action="store_true", help="print the card as one line of JSON")
    add("--plot", action="store_true", help="plot perplexity against entropy and MAUVE against steps for several cards")
    _reference_arguments(parser.add_argument_group("reference texts"))
    _judge_arguments(parser.add_argument_group("generative perplexity"))
    _mauve_arguments(parser.add_argument_group("MAUVE"))


def _reference_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--reference",
        metavar="DATA",
        type=Path,
        help="a prepared folder, a file with one text per line (.txt, .jsonl), or a samples file",
    )
    add("--split", metavar="NAME", help="split of a prepared folder (default: valid)")
    add("--field", default="text", metavar="NAME", help="field of a .jsonl file (default: text)")
    add("--num-reference", type=int, metavar="N", help="number of reference texts (default: as many as samples)")
    add("--reference-seed", type=int, default=0, metavar="S", help="seed that selects the reference texts (default: 0)")
    add("--judge-reference", action="store_true", help="also report perplexity, entropy and diversity of the reference")


def _judge_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--model",
        default="gpt2-large",
        metavar="JUDGE",
        help="Hugging Face name or folder, a .gguf file, or an AR or A2R model folder (default: gpt2-large)",
    )
    add(
        "--eos",
        choices=tuple(EOS),
        help=_format_choices(EOS, "closing for an adlm model, published for a Hugging Face model"),
    )
    add(
        "--start",
        choices=tuple(START),
        help=_format_choices(START, "bos for an adlm model, given for a Hugging Face model"),
    )
    add(
        "--ids",
        choices=("auto", "retokenised", "as-sampled"),
        default="auto",
        help="ids the judge reads: the text retokenised, as published, or the ids as\n"
        "sampled (default: auto, as-sampled for an adlm model with the same tokenizer)",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="truncate texts to N tokens (default: no truncation; published: the model's length)",
    )
    add("--context", type=int, metavar="N", help="maximum context window (default: the judge's)")


def _mauve_arguments(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--features",
        default="gpt2-large",
        metavar="NAME",
        help="Hugging Face name or folder, or minilm (default: gpt2-large)",
    )
    add(
        "--pooling",
        choices=("last", "mean"),
        help="pooling of the last layer: last token or mean (default: last; minilm: mean)",
    )
    add("--given-features", nargs=2, metavar=("SAMPLES.npy", "REFERENCE.npy"), type=Path, help="precomputed features")
    add("--seeds", type=int, default=5, metavar="N", help="number of clusterings, with seeds 25, 26, ... (default: 5)")
    add("--clusters", type=int, metavar="K", help="clusters per clustering (default: a tenth of the samples)")


def _format_choices(meanings: Mapping[Any, str], default: str) -> str:
    return "\n".join(f"{name}: {meaning}" for name, meaning in meanings.items()) + f"\n(default: {default})"
