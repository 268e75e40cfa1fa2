"""ASGI middleware around the application: API key, Host, size of the body, headers, request ids, log and metrics.

The log is one JSON object a line, without prompts or completions; the metrics are Prometheus's.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import traceback
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adlm.apps.server.bodies import ApiError, error_response

# Of responses that do not set their own, as the files of the studio do.
HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
NOT_ANSWERED = 499
"""The status in log and metrics if the client is gone before the response."""
BODY_SECONDS = 30.0
"""Time within which the body of a request must arrive."""
log = logging.getLogger("adlm.apps.server")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class PrometheusMonitor:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("adlm_requests", "HTTP requests", ["route", "status"], registry=self.registry)
        self._seconds = Histogram(
            "adlm_request_seconds", "Seconds from request to the end of its response", ["route"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._queue = Gauge("adlm_queue_rows", "Rows that wait", ["model"], registry=self.registry)
        self._running = Gauge("adlm_running_rows", "Rows that are sampled", ["model"], registry=self.registry)
        self._call_rows = Histogram(
            "adlm_call_rows", "Rows of each network call", ["model"], buckets=ROWS, registry=self.registry
        )
        self._call_seconds = Histogram(
            "adlm_call_seconds", "Seconds per network call", ["model"], buckets=SECONDS, registry=self.registry
        )
        self._tokens = Counter("adlm_tokens", "Tokens of answered requests", ["model", "kind"], registry=self.registry)

    def request_done(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def queue_changed(self, model: str, num_rows: int) -> None:
        self._queue.labels(model).set(num_rows)

    def running_changed(self, model: str, num_rows: int) -> None:
        self._running.labels(model).set(num_rows)

    def call_done(self, model: str, num_rows: int, seconds: float) -> None:
        self._call_rows.labels(model).observe(num_rows)
        self._call_seconds.labels(model).observe(seconds)

    def count_tokens(self, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        self._tokens.labels(model, "prompt").inc(prompt_tokens)
        self._tokens.labels(model, "completion").inc(completion_tokens)

    def as_text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON; `extra={"fields": {...}}` adds to it.

    Of an exception the type and the traceback are logged, not the message, which may quote a prompt.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["traceback"] = "".join(traceback.format_tb(record.exc_info[2]))
        return json.dumps(line)


class ClientGone(Exception):
    """The client has disconnected before its request was complete."""


@dataclass(frozen=True)
class RequestGuard:
    app: ASGIApp
    monitor: PrometheusMonitor
    api_key: str | None
    max_body_bytes: int
    without_key: frozenset[str]
    """Paths that need no key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started, status = f"req_{uuid.uuid4().hex}", time.monotonic(), NOT_ANSWERED
        scope["state"] = {**scope.get("state", {}), "log_fields": {}}

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_client(scope)
            body = await self._read_body(scope, receive)
            await self.app(scope, _replay(body, receive), send_guarded)
        except ClientGone:
            pass  # nobody reads a response
        except ApiError as error:
            await error_response(error)(scope, receive, send_guarded)
        except Exception as error:  # a bug: reported here, so that the response has its headers and is counted
            log.error("bug", extra={"fields": {"request_id": request_id}}, exc_info=error)
            if status == NOT_ANSWERED:
                bug = ApiError(500, "internal error; the server's log has the details")
                await error_response(bug)(scope, receive, send_guarded)
        finally:
            route = getattr(scope.get("route"), "path", "none")  # not the path: it is the client's text
            seconds = time.monotonic() - started
            self.monitor.request_done(route, status, seconds)
            fields = {"request_id": request_id, "route": route, "status": status, "seconds": round(seconds, 4)}
            log.info("request", extra={"fields": {**fields, **scope["state"]["log_fields"]}})

    def _check_client(self, scope: Scope) -> None:
        """A key where one is set. Without one, only pages of this machine may ask: a page on the web can have its own
        name resolved to 127.0.0.1 (DNS rebinding), but its requests still carry that name."""
        if self.api_key is None:
            host = Headers(scope=scope).get("host", "localhost")
            if not is_loopback(re.sub(r":\d*$", "", host).strip("[]")):
                raise ApiError(403, "the Host header must name this machine; use 127.0.0.1 or localhost, or set a key")
            return
        if scope["path"] in self.without_key:
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self.api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The body, refused as soon as it is known to be too large."""
        too_large = ApiError(413, f"the body is larger than {self.max_body_bytes} bytes; send less text per request")
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and (len(announced) > 15 or int(announced) > self.max_body_bytes):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > self.max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(400, f"the body did not arrive within {BODY_SECONDS:g} s") from None


def is_loopback(host: str) -> bool:
    """Whether a name or address is that of this machine for itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` after the body was read: the body, then what else arrives, such as a disconnect."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
