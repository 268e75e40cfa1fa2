"""`adlm serve`: models over HTTP, as the OpenAI client speaks it."""

import argparse
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from adlm.cli.arguments.serve import KEY_VARIABLE
from adlm.cli.streams import StandardError
from adlm.distributed import device_of
from adlm.errors import UserError, whole_number
from adlm.files import read_bytes
from adlm.language_model import LanguageModel, load

if TYPE_CHECKING:
    from typing import TextIO

CPU_BATCH, GPU_BATCH = 4, 16
LONGEST_KEY = 4096


def run(arguments: argparse.Namespace) -> int:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"adlm serve needs the package {package}; install it with: pip install 'adlm[web]'")
    from adlm.apps.server.app import ServerSettings, make_app  # here, so that --help needs no fastapi
    from adlm.apps.server.completion import Limits
    from adlm.apps.server.guard import JsonFormatter, is_loopback
    from adlm.apps.server.serving import Server, address_of, listen

    device = device_of(arguments.device)
    batch = arguments.batch
    if batch is None:
        batch = GPU_BATCH if device.type == "cuda" else CPU_BATCH
    if not 0 < arguments.timeout <= 1e6:
        raise UserError(f"--timeout {arguments.timeout:g} must be above 0 and at most 1000000 seconds")
    settings = ServerSettings(
        batch=whole_number("--batch", batch, 1, 4096),
        max_waiting=whole_number("--queue", arguments.queue, 1),
        timeout=arguments.timeout,
        api_key=_api_key(arguments.api_key_file),
        limits=Limits(
            rows=whole_number("--max-rows", arguments.max_rows, 1),
            steps=whole_number("--max-steps", arguments.max_steps, 1),
        ),
    )
    if settings.limits.rows > settings.max_waiting:
        raise UserError(f"--queue {settings.max_waiting} is smaller than --max-rows {settings.limits.rows}; raise it")
    whole_number("--port", arguments.port, 0, 65535)
    if settings.api_key is None and not is_loopback(arguments.host):
        raise UserError(
            f"--host {arguments.host} is open to other machines, and there is no API key; give --api-key-file or "
            f"{KEY_VARIABLE}"
        )
    handler = logging.StreamHandler(cast("TextIO", StandardError()))
    handler.setFormatter(JsonFormatter())
    for name in ("adlm.apps.server", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("adlm.apps.server").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    app = make_app(_load_models(arguments.models, arguments.device), settings)
    with listen(arguments.host, arguments.port) as bound:
        sys.stdout.write(f"adlm: serving {', '.join(app.state.workers)} at {address_of(bound)}\n")
        sys.stdout.flush()
        Server(app).run(sockets=[bound])
    return 0


def _load_models(paths: list[str], device: str) -> dict[str, LanguageModel]:
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
