"""The arguments of `adlm prepare`."""

import argparse
from pathlib import Path

EXAMPLE = """adlm prepare data=wikitext2 tokenizer=gpt2 length=1024 --out prepared/wikitext2
  adlm prepare data.path='texts/*.jsonl.gz' data.field=body tokenizer=gpt2 --out prepared/own --inspect"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="data=NAME, data.path=FILE_OR_GLOB or data.hub=OWNER/NAME, then tokenizer=..., length=...\n"
        "and other config options, or a preset (see adlm presets --explain)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="the prepared folder to create, or an existing one with --inspect"
    )
    parser.add_argument(
        "--inspect",
        action="store_true",
        help="show example rows, document lengths, token frequencies and anchors;\n"
        "of reasoning problems also steps, labels and what each slot is trained towards",
    )
    parser.add_argument("--list", action="store_true", help="list the named corpora")
    parser.add_argument("--json", action="store_true", help="print JSON")
