"""Properties of stopping on a signal."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

# One call that runs in C for minutes, as a backward pass does for seconds: no Python handler runs before it returns.
BUSY = """
import hashlib
from adlm.training.stopping import stop_on_signals

with stop_on_signals(lambda message: print(message, flush=True)) as stop:
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_reported_at_once_and_a_second_one_quits_at_once(number):
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(120, process.kill)  # long before the call returns
        killer.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
            os.kill(process.pid, number)
            assert "finishing this step, then saving" in process.stdout.readline()
            os.kill(process.pid, number)
            assert process.wait() == 128 + number
        finally:
            killer.cancel()
            process.kill()


def test_signal_handlers_are_restored_afterwards():
    from adlm.training.stopping import stop_on_signals

    handler, messages = signal.getsignal(signal.SIGTERM), []
    with stop_on_signals(messages.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        while not messages:
            time.sleep(0.01)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(-1) == -1
