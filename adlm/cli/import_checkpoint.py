"""`adlm import`: convert a checkpoint of the released code to a model folder."""

import argparse
import json
import sys
from typing import Any

from adlm.checkpoints.model_folder import network_of, save_model_folder
from adlm.checkpoints.published import PublishedCheckpoint, read_checkpoint, to_model_folder
from adlm.config.load import to_mapping
from adlm.errors import printable
from adlm.files import refuse_taken
from adlm.models.transformer import num_parameters
from adlm.tokens import load_tokenizer


def run(arguments: argparse.Namespace) -> int:
    refuse_taken(arguments.out)
    published = read_checkpoint(arguments.file)
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    model = to_model_folder(
        published, arguments.weights, tokenizer, arguments.method, arguments.mask_id, arguments.length
    )
    network = network_of(model.config, model.weights)  # fails, before anything is written, if a weight does not fit
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
    text = f"{json.dumps(report)}\n" if arguments.json else printable(_format_report(report))
    save_model_folder(model, arguments.out)
    sys.stdout.write(text)
    return 0


def _notes(published: PublishedCheckpoint, arguments: argparse.Namespace) -> list[str]:
    """The defaults that were assumed, with the option that changes each."""
    notes = []
    if arguments.method is None and published.method == "mdlm" and "parameterization" not in published.hints:
        notes.append(
            "mdlm, sedd and d3pm have the same weights, and the file does not name its method; assuming mdlm (--method)"
        )
    if arguments.tokenizer is None and arguments.mask_id is None:
        notes.append("the mask id is that of the released code (--tokenizer, --mask-id)")
    if arguments.tokenizer is None and "name_or_path" in published.hints:
        notes.append(f"the file was trained with tokenizer {published.hints['name_or_path']} (--tokenizer)")
    if arguments.length is None and "length" not in published.hints:
        notes.append("the length is 1024 (--length)")
    return notes


def _format_report(report: dict[str, Any]) -> str:
    step = "" if report["step"] is None else f" after {report['step']:,} steps"
    weights = f"{report['used']} {report['weights']} tensors, {report['parameters']:,} parameters, all used"
    lines = [f"{report['method']}{step}: {weights}", f"written to {report['folder']}"]
    lines += [f"assumed: {note}" for note in report["notes"]]
    lines += [f"ignored: {entry}" for entry in report["ignored"]]
    return "\n".join(lines) + "\n"
