"""Graceful shutdown on signals, and user errors for out-of-memory and compiler failures. Independent of training."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from adlm.config.schema import Config
from adlm.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_SECONDS = 0.5
"""A signal that arrives again so soon is the same one: `timeout` sends it to the process and then to its group."""


class Stop:
    """The signal that asked the run to stop; 0 if none did."""

    def __init__(self) -> None:
        self.signal = 0


@contextmanager
def stop_on_signals(report: Callable[[str], None]) -> Iterator[Stop]:
    """Inside, SIGTERM, SIGINT or SIGHUP is reported and requests a stop before the next step.

    Validation and sampling that have begun are completed first. The same signal a second time, after ECHO_SECONDS, ends
    the process at once, except SIGHUP: a closing terminal sends it more than once, possibly followed by SIGTERM. If
    SIGHUP is ignored (nohup), it stays ignored.

    Python runs signal handlers between two bytecodes of the main thread, that is, only after a long backward pass has
    returned. The wakeup file descriptor is written to immediately, so a thread that reads it handles the signals.
    """
    stop = Stop()
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        thread = threading.Thread(target=_handle_signals, args=(receiver, stop, report), daemon=True)
        thread.start()  # fails where no more threads can be started: nothing has changed yet
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        # Python writes to the wakeup descriptor only for signals that have a Python handler.
        previous_handlers = {n: signal.signal(n, lambda number, frame: None) for n in SIGNALS if n not in ignored}
        previous_descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield stop
        finally:
            signal.set_wakeup_fd(previous_descriptor)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            sender.close()
            thread.join()


def _handle_signals(receiver: socket.socket, stop: Stop, report: Callable[[str], None]) -> None:
    """Handle the signal numbers that arrive, until the sender is closed."""
    seen: dict[int, float] = {}
    while number := int.from_bytes(receiver.recv(1)):
        if number not in SIGNALS:
            continue
        now = time.monotonic()
        if now - seen.setdefault(number, now) > ECHO_SECONDS and number != signal.SIGHUP:
            os._exit(128 + number)  # the main thread may be busy for minutes; files on disk are complete
        if stop.signal:
            continue
        stop.signal = number
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        quit_hint = "" if number == signal.SIGHUP else f"; {again} to quit now, without saving"
        report(f"{signal.Signals(number).name}: finishing this step, then saving{quit_hint}")


@contextmanager
def explain_out_of_memory(config: Config, rows: int, step: int, resume_hint: Callable[[], str]) -> Iterator[None]:
    """Turn out-of-memory and compiler errors into a UserError that names the options to change.

    `rows` is the number of sequences in a micro-batch.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise _out_of_memory_error(config, rows, step, resume_hint()) from None
    except RuntimeError as error:
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

            raise UserError(
                f"torch.compile failed ({str(error).strip().partition(chr(10))[0]}); delete its cache, which a "
                f"killed process may have damaged ({cache_dir()}), or add train.compile=off; {resume_hint()}"
            ) from None
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise _out_of_memory_error(config, rows, step, resume_hint()) from None


def _out_of_memory_error(config: Config, rows: int, step: int, resume_hint: str) -> UserError:
    train = config.train
    same = "up to rounding" if config.model.dropout == 0 else "in distribution, as dropout differs"
    remedies = [f"train.micro_batch={rows // 2} (now {rows}; the result is the same {same})"] if rows > 1 else []
    remedies += [] if train.recompute else ["train.recompute=true"]
    remedies += [f"more processes with train.shard={train.shard * 2}", "a smaller model or length"]
    return UserError(
        f"out of memory in step {step + 1} with {rows} sequences of up to {config.length} tokens at once; try "
        f"{', or '.join(remedies)}; {resume_hint}"
    )
