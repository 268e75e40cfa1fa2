"""The arguments of `adlm sample`."""

import argparse
from pathlib import Path

from adlm.cli.arguments import add_subcommand as add_subcommand
from adlm.registry import SAMPLER_SUMMARIES, SAMPLERS

EXAMPLE = """adlm sample --prompt "The old man looked at the sea"
  adlm sample runs/own --prompt "Fellow citizens" --length 64
  adlm sample runs/own --fill "Fellow citizens, [MASK*12] the Union." --num 4 --sampler remdm-cap sampling.top_p=0.9
  adlm sample runs/own --watch --trace trace.html --steps 64
  adlm sample runs/own --num 1000 --steps 256 --out samples.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a model folder, a run folder, or owner/name on the Hugging Face hub;\n"
        "`adlm import` makes a model folder of a .ckpt file (default: box, the small model that comes with adlm)",
    )
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="OVERRIDE",
        help="sampling.option=value, such as sampling.top_p=0.9 (default: the model's config)\n"
        "(options: `adlm presets owt/adlm --explain`)",
    )
    add(
        "--fill",
        action="append",
        metavar="TEXT",
        help="text to infill: [MASK] is one masked token, [MASK*12] twelve; may be repeated",
    )
    add("--prompt", metavar="TEXT", help="start of the text")
    add("--suffix", metavar="TEXT", help="end of the text")
    add("--length", type=int, metavar="L", help="number of tokens (default: as many as the model allows)")
    add("--num", type=int, default=1, metavar="N", help="number of samples per --fill (default: 1)")
    add("--sampler", metavar="NAME", help="short for sampling.sampler=NAME; the samplers are listed below")
    add("--steps", type=int, metavar="T", help="short for sampling.steps=T")
    add("--seed", type=int, default=0, metavar="S", help="seed; sample i uses the RNG of (S, i) (default: 0)")
    add("--batch", type=int, metavar="B", help="samples per batch (default: 16, on a GPU 64)")
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto, a GPU if available)")
    add("--out", metavar="FILE", type=Path, help="write the samples as JSON lines; rerun the same command to resume")
    add("--force", action="store_true", help="replace the file of --out or --trace even if it has other content")
    add("--watch", action="store_true", help="show the first sample in the terminal while it is generated")
    add(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write a trace of the first sample: .html for a page, .svg for an animated image, .json for the data",
    )
    add(
        "--special-tokens",
        action="store_true",
        help="show bos, eos and pad in the printed text (ids and --out always include them)",
    )
    add("--json", action="store_true", help="print JSON: one line per sample, or one line with --out")
    lines = "\n".join(f"  {name:20} {SAMPLER_SUMMARIES.get(name, 'of another package')}" for name in SAMPLERS)
    parser.epilog = f"samplers (details: docs/sampling.md):\n{lines}\n\n{parser.epilog}"
