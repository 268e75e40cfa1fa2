"""A server in a thread for the tests of this folder, and requests to it."""

import json
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx

from adlm.apps.server.app import make_app
from adlm.apps.server.serving import Server, address_of, listen

PATIENCE = 120.0
"""Seconds until a test gives up waiting: long, since a busy machine may be many times slower."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A client reads the certificates of all authorities, for 30 ms, unless it is given a context."""
get = partial(httpx.get, timeout=PATIENCE, verify=NO_TLS)
post = partial(httpx.post, timeout=PATIENCE, verify=NO_TLS)


@contextmanager
def running(models, settings):
    """The address of a server that runs in a thread."""
    server = Server(make_app(models, settings))
    with listen("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield address_of(bound)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive(), "the server does not stop"


def wait_until(condition):
    """Fails if the condition does not become true in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def metrics(address):
    """The text of /metrics."""
    return get(f"{address}/metrics").text


@contextmanager
def connection(address, sent=b""):
    """A socket that has sent some bytes; it is closed at the end."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
        client.sendall(sent)
        yield client


def connected(address, body):
    """A client that has sent a completion request and does not read."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    return connection(address, f"{head}content-type: application/json\r\n\r\n".encode() + content)


def read_all(client):
    """What the server sends until it closes the connection."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)
