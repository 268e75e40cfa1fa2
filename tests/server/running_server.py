"""A server in a thread for the tests of this folder."""

import threading
import time
from contextlib import contextmanager

from adlm.server.app import make_app
from adlm.server.serving import Server, address_of, listen


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
            thread.join(30)
    assert not thread.is_alive(), "the server does not stop"


def wait_until(condition, seconds=20.0):
    """Fails if the condition does not become true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
