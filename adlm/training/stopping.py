"""Being told to stop, and running out of memory: what comes from outside a run. Knows nothing of what is running."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from adlm.config.schema import Config
from adlm.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Whether we were told to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal = 0


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """Inside, SIGTERM, SIGINT or SIGHUP is answered and asks to stop after the step.

    The same signal again ends the process, but not SIGHUP: a closed terminal sends it more than once, and perhaps
    SIGTERM after it. Where SIGHUP is ignored (nohup), it stays so.
    Python runs signal handlers between two bytecodes of the main thread, so not before a long backward pass returns.
    The wakeup descriptor is written to at once, and a thread answers it.
    """
    stop = Stop()
    received, sent = socket.socketpair()
    sent.setblocking(False)
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, _wake_up_only) for number in SIGNALS if number not in ignored}
    descriptor = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(received, stop, say), daemon=True)
    watch.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        sent.close()
        watch.join()
        received.close()


def _wake_up_only(number: int, frame: FrameType | None) -> None:
    """A handler of our own, so that signals reach the wakeup descriptor."""


def _watch(received: socket.socket, stop: Stop, say: Callable[[str], None]) -> None:
    """Answer signals, by their numbers, until the other end is closed."""
    seen: set[int] = set()
    while number := int.from_bytes(received.recv(1)):
        if number not in SIGNALS:
            continue
        if number in seen and number != signal.SIGHUP:
            os._exit(128 + number)  # the main thread may be busy for minutes; what is on the disk is whole
        seen.add(number)
        if stop.signal:
            continue
        stop.signal = number
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        quits = "" if number == signal.SIGHUP else f"; {again} to quit now, without saving"
        say(f"{signal.Signals(number).name}: finishing this step, then saving{quits}")


@contextmanager
def explain_out_of_memory(config: Config, rows: int, step: int, last: str) -> Iterator[None]:
    """Where memory runs out or compiling fails, which knob to turn. `rows` sequences are passed through at once."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        _tell(config, rows, step, last)
    except RuntimeError as error:
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise UserError(
                f"torch.compile failed ({str(error).strip().partition(chr(10))[0]}); delete its cache, which a process "
                f"that was killed may have damaged ({cache_dir()}), or add train.compile=off; {last}"
            ) from None
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        _tell(config, rows, step, last)


def _tell(config: Config, rows: int, step: int, last: str) -> None:
    train = config.train
    remedies = [f"train.micro_batch={rows // 2} (now {rows}; the result is the same)"] if rows > 1 else []
    remedies += [] if train.recompute else ["train.recompute=true"]
    remedies += [f"more processes with train.shard={train.shard * 2}", "a smaller model or length"]
    raise UserError(
        f"out of memory in step {step + 1} with {rows} sequences of {config.length} tokens at once; try "
        f"{', or '.join(remedies)}; {last}"
    ) from None
