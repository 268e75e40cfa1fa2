"""Being told to stop, and running out of memory: what comes from outside a run. Knows nothing of what is running."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from adlm.config.schema import Config
from adlm.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether we were told to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal = 0


@contextmanager
def told_to_stop() -> Iterator[Stop]:
    """Inside, the first SIGTERM or SIGINT is written down instead of obeyed; the second ends the process as usual."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_told(config: Config, rows: int, step: int, last: str) -> Iterator[None]:
    """Where memory runs out, which knob to turn. `rows` is how many sequences were passed through at once."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        _tell(config, rows, step, last)
    except RuntimeError as error:
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
