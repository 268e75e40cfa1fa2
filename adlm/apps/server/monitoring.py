"""Prometheus metrics of the server and its log: one JSON object a line, without prompts or completions."""

import json
import logging
import traceback
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
