"""Properties of stopping on a signal."""

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
from small_runs import preload

from adlm.training.stopping import ECHO_SECONDS, stop_on_signals


def busy(messages: Connection) -> None:
    """In a child: one call that runs in C for minutes, as a backward pass does for seconds.

    No Python handler runs before it returns.
    """
    with stop_on_signals(messages.send):
        messages.send("busy")
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_reported_at_once_and_a_second_one_quits_at_once(number):
    received, sent = multiprocessing.Pipe(duplex=False)
    process = preload().Process(target=busy, args=(sent,))
    process.start()
    sent.close()
    try:
        assert received.poll(120)
        assert received.recv() == "busy"
        os.kill(process.pid, number)
        assert received.poll(120), "long before the call returns"
        assert "finishing this step, then saving" in received.recv()
        os.kill(process.pid, number)  # as `timeout` does
        time.sleep(ECHO_SECONDS + 0.2)
        assert process.is_alive(), "the same signal again at once is no second one"
        os.kill(process.pid, number)
        process.join(120)
        assert process.exitcode == 128 + number
    finally:
        process.kill()
        process.join()


def test_signal_handlers_are_restored_afterwards():
    handler, messages = signal.getsignal(signal.SIGTERM), []
    with stop_on_signals(messages.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        while not messages:
            time.sleep(0.01)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(-1) == -1


def test_where_no_more_threads_can_be_started_signals_are_as_before(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), stop_on_signals(print):
        pytest.fail("the thread did not start")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(-1) == -1
