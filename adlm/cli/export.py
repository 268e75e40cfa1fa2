"""`adlm export`: write a model as a folder that Hugging Face transformers loads without adlm, and upload it.

Or as a plain model folder, which needs no base any more: an adapter merged with its base.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adlm.config.load import BOX, MODEL_NAMES, model_source
from adlm.errors import UserError, printable
from adlm.files import refuse_taken
from adlm.request import Request, option


@dataclass(frozen=True)
class ExportRequest(Request):
    """The options of `adlm export`."""

    example = """adlm export runs/own --to hf --out exported/own
  adlm export runs/own --to adlm --out merged/own"""

    model: str = option(
        "a model folder or run folder of method adlm, mdlm, ar or a2r, or smollm2\n"
        "(default: box, the small model that comes with adlm)",
        BOX,
        positional=True,
    )
    to: Literal["hf", "adlm"] = option(
        "the format: hf, a folder for transformers; adlm, a model folder,\n"
        "in which an adapter (train.lora_rank) is merged with its base",
        "hf",
    )
    out: Path = option("the folder to create", metavar="FOLDER")
    force: bool = option("replace the folder of --out if it is an earlier export", False)
    push: str | None = option(
        "also upload the folder to this repository on the Hugging Face hub", None, metavar="OWNER/NAME"
    )
    private: bool = option("create the repository of --push as a private one", False)
    json: bool = option("print JSON", False)


def run(request: ExportRequest) -> int:
    model = model_source(request.model) if request.model in MODEL_NAMES else Path(request.model)
    if request.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", request.push, re.ASCII):
        raise UserError(f"--push {request.push} is not a repository on the hub; give OWNER/NAME")
    from adlm.apps.export.folder import check_exportable, check_folder, export_model, push
    from adlm.checkpoints.adapter import merged_config
    from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
    from adlm.language_model import load
    from adlm.models.transformer import num_parameters

    if request.to == "adlm":
        for name in ("force", "push", "private"):
            if getattr(request, name):
                raise UserError(f"--{name} is for --to hf; leave it out, or upload an export to hf")
        refuse_taken(request.out)
        lm = load(request.model)
        save_model_folder(ModelFolder(merged_config(lm.config), lm.network.state_dict(), lm.tokenizer), request.out)
    else:
        check_folder(request.out, request.force, model)
        lm = load(request.model)
        check_exportable(lm)
        export_model(lm, model, request.out, request.push or request.out.name)
    address = None if request.push is None else push(request.out, request.push, request.private)
    report = {
        "folder": str(request.out),
        "method": lm.config.method,
        "parameters": num_parameters(lm.network),
        "files": sorted(path.name for path in request.out.iterdir()),
        "pushed": address,
    }
    lines = [f"{lm.config.method}, {report['parameters']:,} parameters, written to {request.out}"]
    lines += [f"uploaded to {address}"] * (address is not None)
    sys.stdout.write(f"{json.dumps(report)}\n" if request.json else printable("\n".join(lines) + "\n"))
    return 0
