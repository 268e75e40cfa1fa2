"""`adlm export`: write a model as a folder that Hugging Face transformers loads without adlm, and upload it."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adlm.config.load import BOX, BOX_FOLDER
from adlm.errors import UserError, printable
from adlm.request import Request, option


@dataclass(frozen=True)
class ExportRequest(Request):
    """The options of `adlm export`."""

    example = "adlm export runs/own --to hf --out exported/own"

    model: str = option(
        BOX,
        positional=True,
        metavar="MODEL",
        help="a model folder or run folder of method adlm, mdlm, ar or a2r\n"
        "(default: box, the small model that comes with adlm)",
    )
    to: Literal["hf"] = option("hf", help="the format: hf, a folder for transformers")
    out: Path = option(metavar="FOLDER", help="the folder to create")
    force: bool = option(False, help="replace the folder of --out if it is an earlier export")
    push: str | None = option(
        None, metavar="OWNER/NAME", help="also upload the folder to this repository on the Hugging Face hub"
    )
    private: bool = option(False, help="create the repository of --push as a private one")
    json: bool = option(False, help="print JSON")


REQUEST = ExportRequest


def run(request: ExportRequest) -> int:
    model = BOX_FOLDER if request.model == BOX else Path(request.model)
    if request.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", request.push, re.ASCII):
        raise UserError(f"--push {request.push} is not a repository on the hub; give OWNER/NAME")
    from adlm.apps.export.folder import check_exportable, check_folder, export_model, push
    from adlm.language_model import load
    from adlm.models.transformer import num_parameters

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
