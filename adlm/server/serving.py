"""Running the application with uvicorn: one listening socket, and a shutdown that finishes what has begun."""

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from adlm.errors import UserError

SHUTDOWN_SECONDS = 60
"""How long running requests may take after SIGTERM or SIGINT; a second SIGINT ends them at once."""


class Server(uvicorn.Server):
    """At SIGTERM or SIGINT, waiting requests are refused at once and running batches are finished."""

    def __init__(self, app: FastAPI):
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self.app = app
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:  # not here: the interrupted code may hold the lock of a queue
            self._loop.call_soon_threadsafe(self.refuse_waiting)
        super().handle_exit(sig, frame)

    def refuse_waiting(self) -> None:
        for worker in self.app.state.workers.values():
            worker.stop()


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
