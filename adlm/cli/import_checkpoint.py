"""`adlm import`: convert a checkpoint of the released code to a model folder."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adlm.config.load import to_mapping
from adlm.errors import printable
from adlm.files import refuse_taken
from adlm.registry import METHODS
from adlm.request import Request, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.checkpoints.published import PublishedCheckpoint


@dataclass(frozen=True)
class ImportRequest(Request):
    """The options of `adlm import`."""

    example = "adlm import adlm-owt.ckpt --out models/adlm-owt --tokenizer gpt2"

    file: Path = option("a .ckpt file of the released ADLM, MDLM, SEDD, D3PM or AR code", positional=True)
    out: Path = option("the model folder to create; must not exist", metavar="FOLDER")
    weights: Literal["ema", "raw"] | None = option("EMA or raw weights (default: ema if present)", None)
    tokenizer: str | None = option(
        "tokenizer name or path, saved in the model folder; without it the model works on ids only", None
    )
    method: str | None = option(
        "the method, if the weights are ambiguous: mdlm, sedd and d3pm have the same weights",
        None,
        choices=tuple(METHODS),
    )
    mask_id: int | None = option("mask id, if there is no tokenizer (usually the last id)", None)
    length: int | None = option("maximum sequence length (default: from the file's config, else 1024)", None)
    json: bool = option("print JSON", False)


def run(request: ImportRequest) -> int:
    refuse_taken(request.out)
    from adlm.checkpoints.model_folder import network_of, save_model_folder
    from adlm.checkpoints.published import read_checkpoint, to_model_folder
    from adlm.models.transformer import num_parameters
    from adlm.tokens import load_tokenizer

    published = read_checkpoint(request.file)
    tokenizer = None if request.tokenizer is None else load_tokenizer(request.tokenizer)
    model = to_model_folder(published, request.weights, tokenizer, request.method, request.mask_id, request.length)
    network = network_of(model.config, model.weights)  # fails, before anything is written, if a weight does not fit
    report = {
        "folder": str(request.out),
        "method": model.config.method,
        "parameters": num_parameters(network),
        "weights": "raw" if model.weights is published.weights else "ema",
        "step": published.step,
        "used": len(model.weights),
        "notes": _notes(published, request),
        "ignored": published.ignored,
        "config": to_mapping(model.config),
    }
    text = f"{json.dumps(report)}\n" if request.json else printable(_format_report(report))
    save_model_folder(model, request.out)
    sys.stdout.write(text)
    return 0


def _notes(published: "PublishedCheckpoint", request: ImportRequest) -> list[str]:
    """The defaults that were assumed, with the option that changes each."""
    notes = []
    if request.method is None and published.method == "mdlm" and "parameterization" not in published.hints:
        notes.append(
            "mdlm, sedd and d3pm have the same weights, and the file does not name its method; assuming mdlm (--method)"
        )
    if request.tokenizer is None and request.mask_id is None:
        notes.append("the mask id is that of the released code (--tokenizer, --mask-id)")
    if request.tokenizer is None and "name_or_path" in published.hints:
        notes.append(f"the file was trained with tokenizer {published.hints['name_or_path']} (--tokenizer)")
    if request.length is None and "length" not in published.hints:
        notes.append("the length is 1024 (--length)")
    return notes


def _format_report(report: dict[str, Any]) -> str:
    step = "" if report["step"] is None else f" after {report['step']:,} steps"
    weights = f"{report['used']} {report['weights']} tensors, {report['parameters']:,} parameters, all used"
    lines = [f"{report['method']}{step}: {weights}", f"written to {report['folder']}"]
    lines += [f"assumed: {note}" for note in report["notes"]]
    lines += [f"ignored: {entry}" for entry in report["ignored"]]
    return "\n".join(lines) + "\n"
