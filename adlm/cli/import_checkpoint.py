"""`adlm import`: a checkpoint of the released code becomes a model folder."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from adlm.checkpoints.model_folder import network_of, save_model_folder
from adlm.checkpoints.published import PublishedCheckpoint, read_checkpoint, to_model_folder
from adlm.config.load import to_mapping
from adlm.errors import printable
from adlm.files import refuse_taken
from adlm.methods import METHODS
from adlm.models.transformer import num_parameters
from adlm.tokens import load_tokenizer

EXAMPLE = "adlm import adlm-owt.ckpt --out models/adlm-owt --tokenizer gpt2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="a .ckpt of the released ADLM, MDLM, SEDD, D3PM or AR code"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="where the model folder goes; must be free"
    )
    parser.add_argument(
        "--weights", choices=("ema", "raw"), help="averaged or last weights (averaged where there are any)"
    )
    parser.add_argument(
        "--tokenizer", metavar="T", help="a name or a path, kept in the folder; without one it serves ids"
    )
    parser.add_argument(
        "--method", choices=tuple(METHODS), help="where the weights cannot tell: mdlm, sedd and d3pm look alike"
    )
    parser.add_argument(
        "--mask-id", type=int, metavar="ID", help="where there is no tokenizer (usually the last symbol)"
    )
    parser.add_argument("--length", type=int, metavar="L", help="longest row (as in the file's config, or 1024)")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    refuse_taken(arguments.out)
    published = read_checkpoint(arguments.file)
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    model = to_model_folder(
        published, arguments.weights, tokenizer, arguments.method, arguments.mask_id, arguments.length
    )
    network = network_of(model.config, model.weights)  # every weight has its place, or nothing is written
    report = {
        "folder": str(arguments.out),
        "method": model.config.method,
        "parameters": num_parameters(network),
        "weights": "raw" if model.weights is published.weights else "ema",
        "step": published.step,
        "used": len(model.weights),
        "notes": _notes(published, arguments),
        "ignored": published.ignored,
        "config": to_mapping(model.config),
    }
    text = f"{json.dumps(report)}\n" if arguments.json else printable(_told(report))
    save_model_folder(model, arguments.out)
    sys.stdout.write(text)
    return 0


def _notes(published: PublishedCheckpoint, arguments: argparse.Namespace) -> list[str]:
    """What was taken for granted, and the word that says otherwise."""
    notes = []
    if arguments.method is None and published.method == "mdlm" and "parameterization" not in published.hints:
        notes.append("mdlm, sedd and d3pm have the same weights, and the file does not say which it is (--method)")
    if arguments.tokenizer is None and arguments.mask_id is None:
        notes.append("the mask is taken to be where the released code has it (--tokenizer, --mask-id)")
    if arguments.tokenizer is None and "name_or_path" in published.hints:
        notes.append(f"the file was trained with tokenizer {published.hints['name_or_path']} (--tokenizer)")
    if arguments.length is None and "length" not in published.hints:
        notes.append("the length is taken to be 1024 (--length)")
    return notes


def _told(report: dict[str, Any]) -> str:
    step = "" if report["step"] is None else f" after {report['step']:,} steps"
    weights = f"{report['used']} {report['weights']} weights, {report['parameters']:,} numbers, every one used"
    lines = [f"{report['method']}{step}: {weights}", f"written to {report['folder']}"]
    lines += [f"taken for granted: {note}" for note in report["notes"]]
    lines += [f"ignored: {entry}" for entry in report["ignored"]]
    return "\n".join(lines) + "\n"
