"""Running the application with uvicorn: one socket, connections with limits, a shutdown that finishes what has begun.

uvicorn limits neither clients that send nothing or do not read, nor the number of connections: its keep-alive timeout
begins after a response and ends with the next byte.
"""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from adlm.apps.server.bodies import ApiError
from adlm.errors import UserError

HEAD_SECONDS = 10.0
"""Time within which the head of a request must arrive, after connecting or after the response before."""
UNREAD_SECONDS = 60.0
"""How long a response may wait for a client that does not read it."""
PROBE_SECONDS = 1.0
"""How often a client that has closed its side of the connection is checked."""
MAX_CONNECTIONS = 1000
RESERVED_FILES = 32
"""File descriptors that are left for everything but connections."""
SHUTDOWN_SECONDS = 60.0
"""How long running requests may take after SIGTERM or SIGINT; a second SIGINT ends them at once."""
ABORT_SECONDS = 2.0
"""How long the answers to requests that are ended may take."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class OncePerMinute(logging.Filter):
    """Drops the lines of an event after the first, for a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        is_due = record.created - self._last.get(record.msg, 0.0) >= 60
        if is_due:
            self._last[record.msg] = record.created
        return is_due


log = logging.getLogger("adlm.apps.server.connections")
log.addFilter(OncePerMinute())


def max_connections() -> int:
    """MAX_CONNECTIONS, or fewer if the process may open few files."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MAX_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(8, min(MAX_CONNECTIONS, limit - RESERVED_FILES))


class Connection(H11Protocol):
    """A connection of uvicorn's with limits, whose own errors are JSON too."""

    head_timer: asyncio.TimerHandle | None = None
    """Runs while the connection is idle: no head of a request has arrived, or its response is complete."""
    unread_timer: asyncio.TimerHandle | None = None
    has_probed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            log.warning("too many connections", extra={"fields": {"connections": len(self.connections)}})
            idle = [each for each in self.connections if isinstance(each, Connection) and each.head_timer is not None]
            if not idle:
                self._refuse(ApiError(503, "there are too many connections; try again later"))
                return
            min(idle, key=lambda each: each.head_timer.when()).close_now()  # type: ignore[union-attr]
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timers()

    def close_now(self) -> None:
        self._cancel_timers()
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self.head_timer, self.unread_timer):
            if timer is not None:
                timer.cancel()
        self.head_timer = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its side after a request and wait for the response: True keeps the other side open.

        Not of a stream that has begun: whether its client is gone could be found out only by writing.
        """
        if self._is_idle or self.cycle.more_body or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(sys.maxsize)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread_timer is not None:
            self.unread_timer.cancel()

    def _watch_reading(self, unread_before: int) -> None:
        """Close the connection if the client has read nothing of the response since the last time."""
        unread = self.transport.get_write_buffer_size()
        if unread >= unread_before:
            self.close_now()
        else:
            self.unread_timer = self.loop.call_later(UNREAD_SECONDS, self._watch_reading, unread)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch_head(self) -> None:
        """Start or stop the timer. Bytes of a head that is not complete do not extend it."""
        if self._is_idle and self.head_timer is None and not self.transport.is_closing():
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._end_idle)
        elif not self._is_idle and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _end_idle(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"the head of the request did not arrive within {HEAD_SECONDS:g} s"))
        else:
            self.close_now()

    def _probe(self) -> None:
        """Close the connection if the client is gone.

        To this side of the connection, a client that is gone looks like one that has closed its side and reads: both
        send FIN. To an interim response, the first answers with a reset.
        """
        if self._is_idle or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close_now()
            return
        if not self.has_probed and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.has_probed = True
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))
        self.loop.call_later(PROBE_SECONDS, self._probe)

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error that no application has made, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.as_json()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


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
        log.error("no connection can be accepted", extra={"fields": {"reason": error.strerror}})
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
