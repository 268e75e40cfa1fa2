"""Running the application with uvicorn: one listening socket, and a shutdown that finishes what has begun."""

import asyncio
import errno
import os
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from adlm.apps.server import connections
from adlm.apps.server.connections import Connection
from adlm.errors import UserError

SHUTDOWN_SECONDS = 60.0
"""How long running requests may take after SIGTERM or SIGINT; a second SIGINT ends them at once."""
ABORT_SECONDS = 2.0
"""How long the answers to requests that are ended may take."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(uvicorn.Server):
    """At SIGTERM or SIGINT, waiting requests are refused at once and running batches are finished."""

    def __init__(self, app: FastAPI):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=128,  # asyncio reports a lack of file descriptors as often as this
            )
        )
        self.app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aborted_at: float | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_report_exception)
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the loop and not here: the interrupted code may hold the lock of a queue."""
        assert self._loop is not None, "signals are handled while the loop runs"
        if not self.should_exit:
            super().handle_exit(sig, frame)
            self._loop.call_soon_threadsafe(self._stop_workers)
            self._loop.call_soon_threadsafe(self._loop.call_later, SHUTDOWN_SECONDS, self._abort)
        elif sig == signal.SIGINT:
            if self._aborted_at is None:
                self._aborted_at = time.monotonic()
                self._loop.call_soon_threadsafe(self._abort)
            elif time.monotonic() - self._aborted_at > 2 * ABORT_SECONDS:
                os._exit(130)  # during a network call that takes long

    def _stop_workers(self, at_once: bool = False) -> None:
        for worker in self.app.state.workers.values():
            worker.stop(at_once)

    def _abort(self) -> None:
        """End running requests with an error. uvicorn's own way would leave the threads of the workers behind."""
        self._stop_workers(at_once=True)
        asyncio.get_running_loop().call_later(ABORT_SECONDS, self._close_connections)

    def _close_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _report_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
        connections.log.error("no connection can be accepted", extra={"fields": {"reason": error.strerror}})
    else:
        loop.default_exception_handler(context)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host:.100} --port {port} cannot be used ({problem}); choose another") from None
    return bound


def address_of(bound: socket.socket) -> str:
    """http://HOST:PORT of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
