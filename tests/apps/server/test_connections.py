"""Connections that are silent, half-closed or too many, and requests that are no HTTP."""

import errno
import json
import logging
import os
import socket
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import connected, connection, get, metrics, read_all, running, wait_until

from adlm.apps.server import serving
from adlm.apps.server.app import ServerSettings

HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
)


@pytest.fixture(scope="module")
def address(models):
    with running(models, ServerSettings(batch=1)) as address:
        yield address


def error_of(answer):
    """The status and the error of a response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"\r\n", HEAD + b"\r\nGET /he"],
    ids=["nothing", "part of a head", "a request", "a request and part of a head"],
)
def test_a_connection_without_a_complete_head_is_closed(address, monkeypatch, sent):
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.3)
    with connection(address, sent) as client:
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200") == (HEAD + b"\r\n" in sent)
    if not sent.endswith(b"\r\n\r\n") and sent:
        status, error = error_of(answer[answer.rindex(b"HTTP/1.1") :])
        assert (status, error["message"]) == (408, "the head of the request did not arrive within 0.3 s")


def test_bytes_that_trickle_in_do_not_keep_a_connection_open(address, monkeypatch):
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.3)
    with connection(address, HEAD) as client:
        client.setblocking(False)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                client.sendall(b"a: b\r\n")
            except OSError:  # closed by the server
                return
            time.sleep(0.05)
    raise AssertionError("the connection is open")


def test_a_body_that_does_not_arrive_is_given_up(address, monkeypatch):
    monkeypatch.setattr("adlm.apps.server.guard.BODY_SECONDS", 0.2)
    with connection(address, POST + b"{") as client:
        assert b"400 Bad Request" in client.recv(4096)


def test_a_client_that_does_not_read_is_disconnected(address, monkeypatch):
    monkeypatch.setattr(serving, "UNREAD_SECONDS", 0.1)
    size = len(get(f"{address}/studio/viewer.js").content)
    with connection(address, b"GET /studio/viewer.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000) as client:
        time.sleep(3)
        assert len(read_all(client)) < 2000 * size


def test_a_client_that_reads_slowly_keeps_its_connection_until_it_stops():
    unread, timers, aborted = iter([100, 60, 60]), [], []
    slow = object.__new__(serving.Connection)
    slow.loop = SimpleNamespace(call_later=lambda seconds, *call: timers.append(call))
    slow.transport = SimpleNamespace(get_write_buffer_size=lambda: next(unread), abort=lambda: aborted.append(True))
    slow._watch_reading(sys.maxsize)
    for is_aborted in (False, True):
        watch, unread_before = timers.pop()
        watch(unread_before)
        assert bool(aborted) == is_aborted


def test_silent_connections_make_room_for_others(address, monkeypatch, caplog):
    monkeypatch.setattr(serving, "max_connections", lambda: 8)
    monkeypatch.setattr(serving.log.filters[0], "_last", {})
    silent = [socket.create_connection(address.removeprefix("http://").split(":")) for _ in range(40)]
    with caplog.at_level(logging.WARNING, "adlm.apps.server"):
        assert get(f"{address}/health").status_code == 200
    for client in silent[:30]:
        assert read_all(client) == b""
    for client in silent:
        client.close()
    assert [record.msg for record in caplog.records] == ["too many connections"], "one line"


def test_a_connection_is_refused_while_all_others_have_requests(address, monkeypatch):
    monkeypatch.setattr(serving, "max_connections", lambda: 2)
    with connection(address, POST), connection(address, POST):
        time.sleep(0.2)
        with connection(address) as third:
            status, error = error_of(read_all(third))
    assert (status, error["message"]) == (503, "there are too many connections; try again later")


def test_a_lack_of_file_descriptors_is_one_line_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(serving.log.filters[0], "_last", {})
    with caplog.at_level(logging.WARNING, "adlm.apps.server"):
        for _ in range(100):
            serving._report_exception(None, {"exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE))})
    [record] = caplog.records
    assert (record.msg, record.fields) == ("no connection can be accepted", {"reason": "Too many open files"})


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 TLS\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        POST.replace(b"50", b"many"),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=lambda sent: sent[:30].decode("ascii", "replace"),
)
def test_what_is_no_http_is_answered_with_json(address, sent):
    with connection(address, sent) as client:
        status, error = error_of(read_all(client))
    assert (status, error["message"]) == (400, "the request is not valid HTTP/1.1")


def test_a_client_that_leaves_before_its_body_is_complete_is_499(models):
    with running({"adlm": models["adlm"]}, ServerSettings()) as address:
        with connection(address, POST + b"{"):
            time.sleep(0.1)
        wait_until(lambda: 'adlm_requests_total{route="none",status="499"} 1.0' in metrics(address))


@pytest.mark.parametrize("probe_seconds", [60.0, 0.01])
def test_a_client_that_closes_its_side_after_a_request_gets_its_answer(address, monkeypatch, probe_seconds):
    monkeypatch.setattr(serving, "PROBE_SECONDS", probe_seconds)
    body = {"model": "adlm", "max_tokens": 30, "seed": 0, "steps": 200}
    with connected(address, body) as client:
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert b"HTTP/1.1 200 OK" in answer
    assert b'"usage"' in answer
