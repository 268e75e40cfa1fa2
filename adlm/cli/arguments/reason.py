"""The arguments of `adlm reason`."""

import argparse
from pathlib import Path

from adlm.cli.arguments import add_subcommand

TRAIN = """adlm reason train prosqa/small --out runs/prosqa
  adlm reason train prosqa/gpt2 reason.method=coconut --out runs/coconut"""
EVAL = "adlm reason eval runs/prosqa --data prosqa --out answers.jsonl"
SHOW = "adlm reason show runs/prosqa --data prosqa --problem 7"
EXAMPLE = f"{TRAIN}\n  {EVAL}\n  {SHOW}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = add_subcommand(actions, "train", "train or resume a run", TRAIN)
    train.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="a preset such as prosqa/small, then option=value"
    )
    train.add_argument("--out", metavar="RUN", type=Path, help="run folder (default: runs/PRESET)")
    train.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    evaluate = add_subcommand(actions, "eval", "measure exact-match accuracy on a set of problems", EVAL)
    _add_model(evaluate)
    evaluate.add_argument("--limit", metavar="N", type=int, help="solve the first N problems only")
    evaluate.add_argument(
        "--slots", metavar="N", type=int, nargs="+", help="numbers of slots to evaluate (default: of the last stage)"
    )
    evaluate.add_argument("--out", metavar="FILE", type=Path, help="write every answer as a line of JSON")
    evaluate.add_argument("--force", action="store_true", help="replace an existing FILE")
    evaluate.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    show = add_subcommand(actions, "show", "show one problem being solved: slots, their labels, the answer", SHOW)
    _add_model(show)
    show.add_argument("--problem", metavar="N", type=int, default=1, help="which problem, from 1 on (default: 1)")
    show.add_argument("--json", action="store_true", help="print JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a run or model folder of adlm reason train")
    parser.add_argument(
        "--data",
        metavar="NAME_OR_FILE",
        help="gsm8k, prosqa or prontoqa (in data.root or ADLM_DATA), or a file of problems; default: as trained",
    )
    parser.add_argument("--root", metavar="DIR", help="folder of the corpora (default: as trained, else ADLM_DATA)")
    parser.add_argument("--split", choices=("test", "valid", "train"), default="test", help="default: test")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
