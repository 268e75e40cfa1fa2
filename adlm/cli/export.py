"""`adlm export`: write a model as a folder that Hugging Face transformers loads without adlm, and upload it."""

import argparse
import json
import re
import sys
from pathlib import Path

from adlm.apps.export.folder import check_exportable, check_folder, export_model, push
from adlm.config.load import BOX, BOX_FOLDER
from adlm.errors import UserError, printable
from adlm.language_model import load
from adlm.models.transformer import num_parameters


def run(arguments: argparse.Namespace) -> int:
    model = BOX_FOLDER if arguments.model == BOX else Path(arguments.model)
    if arguments.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.push, re.ASCII):
        raise UserError(f"--push {arguments.push} is not a repository on the hub; give OWNER/NAME")
    check_folder(arguments.out, arguments.force, model)
    lm = load(arguments.model)
    check_exportable(lm)
    export_model(lm, model, arguments.out, arguments.push or arguments.out.name)
    address = None if arguments.push is None else push(arguments.out, arguments.push, arguments.private)
    report = {
        "folder": str(arguments.out),
        "method": lm.config.method,
        "parameters": num_parameters(lm.network),
        "files": sorted(path.name for path in arguments.out.iterdir()),
        "pushed": address,
    }
    lines = [f"{lm.config.method}, {report['parameters']:,} parameters, written to {arguments.out}"]
    lines += [f"uploaded to {address}"] * (address is not None)
    sys.stdout.write(f"{json.dumps(report)}\n" if arguments.json else printable("\n".join(lines) + "\n"))
    return 0
