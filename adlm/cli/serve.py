"""`adlm serve`: models over HTTP, as the OpenAI client speaks it."""

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from adlm.bases.named import NAMED_BASES, find_named_base
from adlm.cli.streams import StandardError
from adlm.config.load import BOX
from adlm.errors import UserError
from adlm.files import read_bytes
from adlm.request import Request, option

if TYPE_CHECKING:
    from typing import TextIO

    from adlm.language_model import LanguageModel

LONGEST_KEY = 4096
KEY_VARIABLE = "ADLM_API_KEY"


@dataclass(frozen=True)
class ServeRequest(Request):
    """The options of `adlm serve`."""

    example = """adlm serve
  adlm serve smollm2
  adlm serve runs/own
  adlm serve runs/own runs/mdlm --port 8080 --api-key-file key.txt

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "own", "prompt": "Fellow citizens", "suffix": " the Union.", "max_tokens": 12, "seed": 0}'

The name of a model is that of its folder. The address, opened in a browser, is the studio: a page to fill in texts and
watch every step. docs/serving.md describes requests, limits and batching."""

    models: tuple[str, ...] = option(
        "run folder, model folder, or owner/name on the Hugging Face hub\n"
        "(default: box, the small model that comes with adlm, and smollm2 if its base weights are on this machine)",
        (),
        positional=True,
    )
    host: str = option("address to listen on (default: 127.0.0.1, this machine only)", "127.0.0.1", metavar="H")
    port: int = option("port; 0 is any free port", 8000, metavar="P", minimum=0, maximum=65535)
    api_key_file: Path | None = option(
        f"file with the key that clients must send (default: the environment variable {KEY_VARIABLE}, or no key)", None
    )
    device: str = option("auto, cuda or cpu (default: auto, a GPU if available)", "auto", metavar="D")
    batch: int | None = option(
        "rows per network call (default: 4, on a GPU 16; of smollm2 on a CPU 1)",
        None,
        metavar="B",
        minimum=1,
        maximum=4096,
    )
    queue: int = option("completions that may wait for a model", 256, minimum=1)
    timeout: float = option("seconds until a request fails", 300.0, metavar="S")
    max_steps: int = option("largest number of sampling steps", 1024, metavar="T", minimum=1)
    max_rows: int = option("completions per request, prompts x n", 16, minimum=1)


def run(request: ServeRequest) -> int:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"adlm serve needs the package {package}; install it with: pip install 'adlm[web]'")
    if not 0 < request.timeout <= 1e6:
        raise UserError(f"--timeout {request.timeout:g} must be above 0 and at most 1000000 seconds")
    if request.max_rows > request.queue:
        raise UserError(f"--queue {request.queue} is smaller than --max-rows {request.max_rows}; raise it")
    api_key = _api_key(request.api_key_file)
    from adlm.apps.server.app import ServerSettings, make_app  # imports torch and fastapi
    from adlm.apps.server.completion import Limits
    from adlm.apps.server.guard import JsonFormatter, is_loopback
    from adlm.apps.server.serving import Server, address_of, listen

    if api_key is None and not is_loopback(request.host):
        raise UserError(
            f"--host {request.host} is open to other machines, and there is no API key; give --api-key-file or "
            f"{KEY_VARIABLE}"
        )
    settings = ServerSettings(
        batch=request.batch,
        max_waiting=request.queue,
        timeout=request.timeout,
        api_key=api_key,
        limits=Limits(rows=request.max_rows, steps=request.max_steps),
    )
    handler = logging.StreamHandler(cast("TextIO", StandardError()))
    handler.setFormatter(JsonFormatter())
    for name in ("adlm.apps.server", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("adlm.apps.server").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    app = make_app(_load_models(request.models or _models_here(), request.device), settings)
    with listen(request.host, request.port) as bound:
        sys.stdout.write(f"adlm: serving {', '.join(app.state.workers)} at {address_of(bound)}\n")
        sys.stdout.flush()
        Server(app).run(sockets=[bound])
    return 0


def _models_here() -> list[str]:
    """The models that come with adlm, as far as their weights are on this machine."""
    return [BOX, *(name for name in NAMED_BASES if find_named_base(name) is not None)]


def _load_models(paths: Sequence[str], device: str) -> "dict[str, LanguageModel]":
    from adlm.language_model import load

    models: dict[str, LanguageModel] = {}
    for path in paths:
        name = Path(path).resolve().name if Path(path).exists() else path
        if name in models:
            raise UserError(f"two models are called {name!r}; rename one of the folders, or pass a symbolic link")
        models[name] = load(path, device)
    return models


def _api_key(file: Path | None) -> str | None:
    """The key of the file or of the environment; None if neither is given."""
    if file is None:
        key, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        key, source = read_bytes(file).decode("ascii", errors="replace"), f"--api-key-file {file}"
    key = key.strip()
    if not 1 <= len(key) <= LONGEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{source} must hold one key of ASCII letters, digits and signs; write one, without spaces")
    return key
