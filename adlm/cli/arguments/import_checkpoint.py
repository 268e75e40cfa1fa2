"""The arguments of `adlm import`."""

import argparse
from pathlib import Path

from adlm.registry import METHODS

EXAMPLE = "adlm import adlm-owt.ckpt --out models/adlm-owt --tokenizer gpt2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="a .ckpt file of the released ADLM, MDLM, SEDD, D3PM or AR code"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="the model folder to create; must not exist"
    )
    parser.add_argument("--weights", choices=("ema", "raw"), help="EMA or raw weights (default: ema if present)")
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help="tokenizer name or path, saved in the model folder; without it the model works on ids only",
    )
    parser.add_argument(
        "--method",
        choices=tuple(METHODS),
        help="the method, if the weights are ambiguous: mdlm, sedd and d3pm have the same weights",
    )
    parser.add_argument(
        "--mask-id", type=int, metavar="ID", help="mask id, if there is no tokenizer (usually the last id)"
    )
    parser.add_argument(
        "--length", type=int, metavar="L", help="maximum sequence length (default: from the file's config, else 1024)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
